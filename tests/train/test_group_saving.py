"""Checkpoints of real ranks: written beside an update, failed writes, killed ranks, damaged files, another number of ranks."""

import asyncio
import os
import re
import resource
import shutil
import signal
from dataclasses import replace

import pytest

from moerl.algorithms.mini_batch_loss import SUPERVISED
from moerl.config.algorithm_settings import algorithm
from moerl.config.schema.data_config import RewardConfig, RewardTerm, TinyData
from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ModelConfig
from moerl.config.schema.rollout_config import RolloutConfig
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
from moerl.train.batching.build_batch import sft_batch
from moerl.train.checkpoint import checkpoint_dirs
from moerl.train.checkpoint.checkpoint_check import faults_of_part, files_of_model, read_manifest, read_state
from moerl.train.group import MegatronTrainGroup
from moerl.types.errors import CheckpointError, TrainError

BATCH = sft_batch([((1, 2, 3), (4, 5)), ((6, 7), (8, 9, 10))])


@pytest.fixture
def run_with(connected, checkpoints, tmp_path):
    """Runs a scenario with a started group and its process ids; every group of a test has the same checkpoints."""
    config = RunConfig(
        name="group",
        num_steps=1,
        groups_per_step=1,
        group_size=2,
        model=ModelConfig(path=str(checkpoints["qwen3_moe"]), max_context=32),
        data=TinyData(task="repeat"),
        reward=RewardConfig(terms={"reward": RewardTerm(kind="prefix")}),
        algorithm=algorithm("grpo"),
        train=TrainConfig(optimizer=OptimizerConfig(lr=1e-3), layout=Layout(ranks=2, ep=2), dtype="float32", micro_batch_tokens=64),
        rollout=RolloutConfig(max_response_tokens=8),
        output_dir=str(tmp_path / "runs"),
    )

    def run(scenario, layout=config.train.layout):
        changed = replace(config, train=replace(config.train, layout=layout))
        group = MegatronTrainGroup(changed, model_dir=checkpoints["qwen3_moe"], checkpoint_dir=tmp_path / "checkpoints")

        async def whole():
            try:
                await group.start()
                await scenario(group, [rank.process.pid for rank in group.watched])
            finally:
                await group.close()

        asyncio.run(whole())

    return run


def update(group):
    return group.update(BATCH, SUPERVISED, lr=1e-3)


def test_checkpoints_written_beside_updates_hold_the_weights_before_them_also_for_other_ranks(run_with, tmp_path):
    after = []

    async def save(group, pids):
        for version in (1, 2, 3):
            await update(group)
            await group.save(version, {"drawn": version})
        after.append(await update(group))  # while 3 is being written
        after.append((await group.logprobs(BATCH)).get())
        saved = await group.saved(wait=True)
        assert [each.version for each in saved] == [1, 2, 3]
        assert all(each.num_bytes == saved[0].num_bytes > 100_000 for each in saved)

    async def continue_(group, pids):
        assert await group.load() == (3, {"version": 3, "drawn": 3})
        stats, logprobs_T = await update(group), (await group.logprobs(BATCH)).get()
        assert (stats.loss, stats.grad_norm) == pytest.approx((after[0].loss, after[0].grad_norm), rel=1e-5)
        assert logprobs_T == pytest.approx(after[1], abs=1e-5)

    run_with(save)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    run_with(continue_, Layout(ranks=1))


def test_a_checkpoint_that_goes_while_the_ranks_read_it_is_not_there_any_more(run_with, tmp_path, monkeypatch):
    """As an evaluation finds it, whose run goes on and deletes the checkpoint."""

    def deleted(directory, part):
        files = files_of_model(directory, part)
        shutil.rmtree(directory)
        return files

    async def scenario(group, pids):
        await update(group)
        await group.save(1, {})
        await group.saved(wait=True)
        monkeypatch.setattr("moerl.train.group.files_of_model", deleted)
        with pytest.raises(CheckpointError, match="step-000001 is not there any more: its run may be going on"):
            await group.load()

    run_with(scenario)


def limit_file_size(pid, num_bytes):
    """From then on a write past it fails in that process, as on a full disk."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]))


def test_a_rank_that_cannot_write_is_the_cause_and_the_checkpoint_before_stays(run_with, tmp_path):
    async def scenario(group, pids):
        await update(group)
        await group.save(1, {})
        await group.saved(wait=True)
        limit_file_size(pids[1], 100_000)
        await group.save(2, {})
        await update(group)
        with pytest.raises(CheckpointError) as caught:
            await group.saved(wait=True)
        first, cause, reason, *_ = str(caught.value).splitlines()
        before = tmp_path / "checkpoints" / "step-000001"
        assert first == f"checkpoint {tmp_path}/checkpoints/step-000002 could not be written; the newest complete one is {before}"
        assert re.fullmatch(r"rank 1 of 2 failed in write_checkpoint, on node \S+", cause)
        assert reason == "    OSError: [Errno 27] File too large"
        assert checkpoint_dirs.newest(tmp_path / "checkpoints") == before
        limit_file_size(pids[1], resource.RLIM_INFINITY)
        await group.save(3, {})  # the ranks are none the worse
        await group.saved(wait=True)
        assert await group.load() == (3, {"version": 3})

    run_with(scenario)


def test_ranks_killed_during_a_save_leave_the_checkpoint_before(run_with, tmp_path):
    async def scenario(group, pids):
        await update(group)
        await group.save(1, {})
        await group.saved(wait=True)
        os.kill(pids[0], signal.SIGSTOP)  # it cannot finish the checkpoint
        saving = asyncio.create_task(group.save(2, {}))
        assert await asyncio.wait([saving], timeout=1) == (set(), {saving})
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises((CheckpointError, TrainError), match=r"failed in stage_checkpoint|could not be written"):
            await saving
        with pytest.raises(TrainError, match="update"):
            await update(group)

    run_with(scenario)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000001", "step-000002.tmp"]
    assert read_state(checkpoint_dirs.newest(tmp_path / "checkpoints")) == {"version": 1}
    assert faults_of_part(checkpoint_dirs.newest(tmp_path / "checkpoints"), part=0, num_parts=1) == []


def test_every_damaged_file_is_named_whichever_rank_finds_it(run_with, tmp_path):
    async def scenario(group, pids):
        await update(group)
        for version in (1, 2):
            await group.save(version, {})
        await group.saved(wait=True)
        for rank in range(2):
            flip_a_bit(tmp_path / "checkpoints" / "step-000002" / f"__{rank}_0.distcp")
        with pytest.raises(CheckpointError) as caught:
            await group.load()
        first, *faults = str(caught.value).splitlines()
        assert f"delete {tmp_path}/checkpoints/step-000002 to continue from step-000001" in first
        assert [fault.split(":")[0] for fault in faults] == ["* __0_0.distcp", "* __1_0.distcp"]
        assert all("contents differ from what was written; holds decoder." in fault for fault in faults)

    run_with(scenario)


def flip_a_bit(file):
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)


def test_damage_of_a_model_beside_the_policy_is_named_with_the_policys(run_with, tmp_path):
    """Nobody has read its files when the policy's are found damaged, and it is not loaded after them."""
    directory = tmp_path / "checkpoints" / "step-000001"

    async def scenario(group, pids):
        await update(group)
        await group.save(1, {})
        await group.saved(wait=True)
        put_beside(directory, "critic")
        assert await group.load() == (1, {"version": 1})
        await group.load_part(directory, "critic")
        flip_a_bit(directory / "critic" / "__1_0.distcp")
        with pytest.raises(CheckpointError) as caught:
            await group.load_part(directory, "critic")
        assert [fault.split(":")[0] for fault in str(caught.value).splitlines()[1:]] == ["* critic/__1_0.distcp"]
        flip_a_bit(directory / "__0_0.distcp")
        with pytest.raises(CheckpointError) as caught:
            await group.load()
        assert [fault.split(":")[0] for fault in str(caught.value).splitlines()[1:]] == ["* __0_0.distcp", "* critic/__1_0.distcp"]

    run_with(scenario)


def put_beside(directory, name):
    """A second model, of the same form, as a checkpoint has those that learn beside the policy."""
    files = files_of_model(directory)
    (directory / name).mkdir()
    for file in files:
        shutil.copy(directory / file, directory / name)
    written = read_manifest(directory)
    files = dict(written.files) | {f"{name}/{file}": entry for file, entry in files.items()}
    (directory / checkpoint_dirs.MANIFEST).write_text(checkpoint_dirs.manifest_text({"model": written.model, "files": files}))
