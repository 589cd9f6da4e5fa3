"""What the driver hears when ranks fail: real ranks as Ray actors, killed and stopped."""

import asyncio
import itertools
import os
import signal
from dataclasses import replace

import pytest
import ray

from moerl.algorithms.sft import SFT
from moerl.config.layout import Layout
from moerl.config.schema import GRPOConfig, ModelConfig, RewardConfig, RewardTerm, RolloutConfig, RunConfig, TinyData, WeightsConfig
from moerl.config.schema_deadlines import DeadlineConfig
from moerl.config.schema_train import OptimizerConfig, TrainConfig
from moerl.train.batch import sft_batch
from moerl.train.group import MegatronTrainGroup
from moerl.types import HangError, ResidencyError, TrainError

BATCH = sft_batch([((1, 2, 3), (4, 5)), ((6, 7), (8, 9, 10))])


@pytest.fixture(scope="module")
def cluster():
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        "local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=1
    )  # fewer cores than ranks, as on a laptop
    yield
    ray.shutdown()


@pytest.fixture
def run_with(cluster, checkpoints, tmp_path):
    """Runs a scenario with a started group of two ranks and their process ids."""
    config = RunConfig(
        name="group",
        num_steps=1,
        groups_per_step=1,
        group_size=2,
        model=ModelConfig(path=str(checkpoints["qwen3_moe"]), max_context=32),
        data=TinyData(task="repeat"),
        reward=RewardConfig(terms={"reward": RewardTerm(kind="prefix")}),
        algorithm=GRPOConfig(),
        train=TrainConfig(optimizer=OptimizerConfig(lr=1e-3), layout=Layout(ranks=2, ep=2), dtype="float32", micro_batch_tokens=64),
        rollout=RolloutConfig(max_response_tokens=8),
        output_dir=str(tmp_path / "runs"),
        weights=WeightsConfig(bucket_bytes=20_000),
    )

    def run(scenario, deadlines=DeadlineConfig(), **changes):
        changed = replace(config, train=replace(config.train, **changes), deadlines=deadlines)
        group = MegatronTrainGroup(changed, model_dir=checkpoints["qwen3_moe"], checkpoint_dir=tmp_path / "checkpoints")

        async def whole():
            try:
                await group.start()
                await scenario(group, [await worker.process_id.remote() for worker in group._workers])
            finally:
                await group.close()

        asyncio.run(whole())

    return run


async def pack_the_rest(group):
    for index in itertools.count(1):
        if await group.next_bucket(index) is None:
            return


def test_a_rank_that_dies_during_a_push_is_named_although_another_one_sends(run_with):
    async def scenario(group, pids):
        await group.listen("shm", 1)
        assert (await group.next_bucket(0)).index == 0
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(TrainError, match=r"^rank 1 of 2 failed in join_export, on node .*\n    its process \d+ died without a Python error\n"):
            await pack_the_rest(group)

    run_with(scenario)


def test_ranks_that_do_not_answer_are_named_at_the_deadline(run_with):
    async def scenario(group, pids):
        stats = await group.update(BATCH, SFT(), lr=1e-3)
        assert stats.num_tokens == 5
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(HangError) as e:
            await group.update(BATCH, SFT(), lr=1e-3)
        print(str(e.value))
        print(open(str(e.value).splitlines()[-1].split(": ")[1]).read())
    run_with(scenario, deadlines=DeadlineConfig(update_seconds=2))


def test_a_group_sleeps_between_its_phases_and_refuses_to_work_then(run_with):
    async def scenario(group, pids):
        async with group.awake():
            assert await group.load() == (0, {})
        with pytest.raises(ResidencyError, match=r"^update: the trainer is asleep; legal now: wake$"):
            await group.update(BATCH, SFT(), lr=1e-3)
        async with group.awake():
            stats = await group.update(BATCH, SFT(), lr=1e-3)
            await group.listen("shm", 1)
            assert (await group.next_bucket(0)).index == 0
            await pack_the_rest(group)
            await group.save(1, {})
        async with group.awake():
            assert await group.load() == (1, {"version": 1})
        assert set(stats.memory.device_bytes["asleep"].values()) == {0}
        assert stats.memory.transition_seconds["scoring_to_training"] > 0

    run_with(scenario, offload="all", destroy_groups=True)
