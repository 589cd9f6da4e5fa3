"""What the driver hears when ranks fail: real ranks as Ray actors, killed and stopped."""

import asyncio
import os
import re
import signal
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from awake import awake
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError

from moerl.algorithms.columns import TokenLoss
from moerl.algorithms.mini_batch_loss import SUPERVISED, Loss
from moerl.config.algorithm_settings import algorithm
from moerl.config.schema.data_config import RewardConfig, RewardTerm, TinyData
from moerl.config.schema.deadlines import DeadlineConfig
from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ModelConfig
from moerl.config.schema.rollout_config import RolloutConfig, WeightsConfig
from moerl.config.schema.run_config import NetworkConfig, RunConfig
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
from moerl.hangs.hang_reports import HangReports
from moerl.hangs.progress import MICRO_BATCH, WORK, read_progress
from moerl.train import rank_calls
from moerl.train.batching.build_batch import sft_batch
from moerl.train.checkpoint import checkpoint_dirs
from moerl.train.group import MegatronTrainGroup
from moerl.train.rank_calls import RankCalls
from moerl.types.errors import CheckpointError, ConfigError, HangError, Origin, ResidencyError, StoreError, TrainError
from moerl.types.exit_codes import ExitCode
from moerl.weights.installation import Loader
from moerl.weights.plan.buckets import stored_specs
from moerl.weights.push_calls import in_thread
from moerl.weights.sync import WeightSync
from moerl.weights.verify.places import place_of_all
from moerl.weights.weight_session import WeightSession

BATCH = sft_batch([((1, 2, 3), (4, 5)), ((6, 7), (8, 9, 10))])
DEADLINES = DeadlineConfig()
LONG_BATCH = sft_batch([((1, 2, 3), tuple(range(4, 30)))] * 60)
"""Of many micro-batches."""


@pytest.fixture
def config(checkpoints, tmp_path):
    return RunConfig(
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
        weights=WeightsConfig(bucket_bytes=20_000),
        network=NetworkConfig(variables={"NCCL_DEBUG": "WARN"}),
    )


@pytest.fixture
def run_with(connected, checkpoints, config, tmp_path):
    """Runs a scenario with a started group of two ranks and their process ids."""

    def run(scenario, *, deadlines=DEADLINES, interface="lo", **changes):
        network = replace(config.network, interface=interface)
        changed = replace(config, train=replace(config.train, **changes), network=network, deadlines=deadlines)
        group = MegatronTrainGroup(changed, model_dir=checkpoints["qwen3_moe"], checkpoint_dir=tmp_path / "checkpoints")

        async def whole():
            try:
                await group.start()
                await scenario(group, [rank.process.pid for rank in group.watched])
            finally:
                processes = [place.process for place in group._ranks._calls._places]
                await group.close()
                _, alive = psutil.wait_procs([psutil.Process(each.pid) for each in processes if psutil.pid_exists(each.pid)], timeout=20)
                assert not alive

        asyncio.run(whole())

    return run


class Received:
    """What a rollout server does with a push; `on_load` is called with the number of tensors that have come, before each. A
    WeightReceiver."""

    def __init__(self, specs, on_load):
        self._session = WeightSession({spec.name: spec for spec in specs}, Loader(load=self._load, takes_whole=lambda name: True))
        self._num_loaded, self._on_load = 0, on_load
        for step in ("connect", "begin", "install"):
            setattr(self, step, partial(in_thread, getattr(self._session, step)))

    async def needs(self):
        return (self._session.needs,)

    async def finish(self, version, push_id):
        await in_thread(self._session.finish, version)

    def _load(self, name, start, tensor):
        self._on_load(self._num_loaded)
        self._num_loaded += 1
        return [place_of_all(tensor)]


async def push_to_one(group, on_load=lambda number: None, transport="ipc", **options):
    """From both ranks."""
    receiver = Received(stored_specs((await group.weight_source.outline()).tensors), on_load)
    stats = await WeightSync(group.weight_source, {"server": receiver}, transport=transport, **options).push(1)
    assert stats.num_senders == 2


def signal_in_send(pid, number):
    """Once, from the third bucket on, when the rank's own record says that it sends: the first buckets may be another's alone."""
    struck = []

    def on_load(num_loaded):
        if num_loaded >= 3 and not struck and (work := read_progress(pid)[WORK]).text == "send_push" and work.first:
            struck.append(num_loaded)
            os.kill(pid, number)

    return on_load


def test_a_rank_that_dies_during_a_push_is_named_and_the_others_are_in_no_collective(run_with):
    async def scenario(group, pids):
        with pytest.raises(TrainError, match=r"^rank 1 of 2 failed in send_push, on node .*\n    its process \d+ died without") as caught:
            await push_to_one(group, signal_in_send(pids[1], signal.SIGKILL))
        assert "memory" not in str(caught.value)
        await group.weight_source._one_rank(0, "finish_push")

    run_with(scenario)


def test_ranks_meet_over_the_network_that_the_run_names(run_with):
    async def scenario(group, pids):
        # What they were told at the start is in their environment, which is kept; what the run says is set in any case.
        names = {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}
        assert (
            await group._ranks.all("set_environment", group._config.network, {"OWN": 1}, False)
            == [{**names, "NCCL_DEBUG": "WARN", "OWN": "1"}] * 2
        )
        assert await group._ranks.all("set_environment", NetworkConfig(), {}, False) == [{}] * 2
        stats = await group.update(BATCH, SUPERVISED, lr=1e-3)
        assert stats.num_tokens == 5

    run_with(scenario)


def test_an_interface_that_a_node_does_not_have_is_refused_before_ranks_meet(run_with):
    async def scenario(group, pids):
        raise AssertionError("it must not start")

    with pytest.raises(ConfigError, match=r"network\.interface = 'nope0': is not an interface of"):
        run_with(scenario, interface="nope0")


def report_of(error):
    """The conclusion, and the section of each process by its name."""
    path = str(error).splitlines()[-1].removeprefix("stacks and progress of all: ")
    conclusion, *sections = Path(path).read_text().split("\n== ")
    return conclusion, {section.split(" on node")[0]: section for section in sections}


def signal_when(number, pid, is_there):
    """Once the process's own record, by line, says that it is where the signal should find it."""
    end = time.monotonic() + 20
    while not is_there(read_progress(pid)) and time.monotonic() < end:
        os.sched_yield()
    os.kill(pid, number)


def in_second_micro_batch(lines):
    """All groups of ranks have met: in the first one a rank may still wait for another to connect, and notices nothing."""
    work, micro_batch = lines[WORK], lines.get(MICRO_BATCH)
    return work.text == "update" and micro_batch is not None and micro_batch.first >= 2


def test_a_rank_frozen_in_an_update_is_told_from_those_that_wait_for_it(run_with):
    """All are silent."""

    async def scenario(group, pids):
        updating = asyncio.create_task(group.update(LONG_BATCH, SUPERVISED, lr=1e-3))
        await asyncio.to_thread(signal_when, signal.SIGSTOP, pids[1], in_second_micro_batch)
        with pytest.raises(HangError) as caught:
            await updating
        first, second, third, *_ = str(caught.value).splitlines()
        assert first == "update: rank 1 did not arrive within 3 s (deadlines.update_seconds)"
        assert second.startswith(f"* rank 1 on node {socket.gethostname()}, process {pids[1]}: its process is stopped (state stopped")
        assert re.search(
            r"in update for \d+\.\d s; micro-batch \d+ of \d+; (inside|newest communication) \w+ of \[0, 1\] \w+, number \d+", third
        )
        assert (caught.value.names, caught.value.origin.doing) == (("rank 1",), "update")
        conclusion, sections = report_of(caught.value)
        assert str(caught.value).startswith(conclusion.strip())
        assert "stacks: py-spy" in sections["rank 1"]
        assert re.search(r"MegatronEngine\._update \(/.*moerl/train/megatron_engine.py:\d+\)", sections["rank 1"])
        assert re.search(r"in update for .*; inside \w+ of \[0, 1\]", sections["rank 0"])
        assert f"rank 1 of 2 on {socket.gethostname()}" in sections["rank 1"], "the end of its log"
        with pytest.raises(HangError):  # at once, whatever comes next
            await group.logprobs(BATCH)

    run_with(scenario, deadlines=DeadlineConfig(update_seconds=3))


def test_a_driver_that_stood_still_beyond_a_deadline_takes_the_answers_that_came_meanwhile(run_with):
    """As after Ctrl-Z: ranks that had answered were said to hang, or nobody was found, and the run ended with `StopIteration`."""

    async def scenario(group, pids):
        updating = asyncio.create_task(group.update(LONG_BATCH, SUPERVISED, lr=1e-3))
        await asyncio.sleep(0.1)
        assert not updating.done()
        time.sleep(10)  # noqa: ASYNC251 - the loop stands still, as its process would
        assert (await updating).num_tokens == 60 * 26

    run_with(scenario, deadlines=DeadlineConfig(update_seconds=3))


def test_a_rank_frozen_in_a_push_is_named_although_all_others_wait(run_with):
    async def scenario(group, pids):
        freeze = signal_in_send(pids[1], signal.SIGSTOP)
        with pytest.raises(HangError, match=r"^push: rank 1 did not arrive within 12 s \(deadlines.push_seconds\)\n") as caught:
            await push_to_one(group, freeze, deadline_seconds=12, settle_seconds=1)
        _, sections = report_of(caught.value)
        assert "in send_push for" in sections["rank 1"]
        assert "stacks: py-spy" in sections["rank 1"]

    run_with(scenario, deadlines=DeadlineConfig(push_seconds=12, settle_seconds=1))


def test_a_rank_whose_file_system_hangs_in_a_push_is_named_although_all_others_wait(run_with, tmp_path):
    """Its process runs. Opening a pipe that nobody reads blocks for ever."""

    def block(num_loaded):
        if num_loaded == 0:
            (directory,) = tmp_path.rglob("rank-1")
            os.mkfifo(directory / "push-000001-bucket-00002.partial")

    async def scenario(group, pids):
        with pytest.raises(HangError, match=r"^push: rank 1 did not arrive within 12 s \(deadlines.push_seconds\)\n") as caught:
            await push_to_one(group, block, "disk", deadline_seconds=12, settle_seconds=1)
        assert re.search(r"DiskSender.write \(/.*disk_transport.py:\d+\)", report_of(caught.value)[1]["rank 1"])

    run_with(scenario, deadlines=DeadlineConfig(push_seconds=12, settle_seconds=1))


def test_a_rank_frozen_in_the_staging_of_a_save_is_named(run_with):
    async def scenario(group, pids):
        await group.update(BATCH, SUPERVISED, lr=1e-3)
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(HangError, match=r"^save: rank 1 did not arrive within 2 s \(deadlines.save_seconds\)\n") as caught:
            await group.save(1, {})
        _, sections = report_of(caught.value)
        assert "TrainWorker.stage_checkpoint" in sections["rank 0"]
        assert "stacks: py-spy" in sections["rank 1"]

    run_with(scenario, deadlines=DeadlineConfig(save_seconds=2))


def test_a_rank_whose_file_system_hangs_while_it_writes_a_checkpoint_is_named(run_with, monkeypatch):
    """Opening a pipe that nobody reads blocks for ever, like a file of a storage that is gone."""

    def begin(root, version):
        directory = upstream(root, version)
        os.mkfifo(directory / "__1_0.distcp")
        return directory

    upstream = checkpoint_dirs.begin
    monkeypatch.setattr(checkpoint_dirs, "begin", begin)

    async def scenario(group, pids):
        await group.update(BATCH, SUPERVISED, lr=1e-3)
        await group.save(1, {})
        with pytest.raises(CheckpointError, match=r"could not be written.*\nsave: rank 1 did not arrive within 2 s") as caught:
            await group.saved(wait=True)
        assert isinstance(caught.value.__cause__, HangError)
        conclusion, sections = report_of(caught.value)
        assert "after stage_checkpoint for" in conclusion and "beside it in write_checkpoint for" in conclusion
        assert re.search(r"ShardWriter.write \(/.*shard_writer.py:\d+\)", sections["rank 1"])

    run_with(scenario, deadlines=DeadlineConfig(save_seconds=2))


def test_an_exception_of_one_rank_in_the_middle_of_collectives_is_told_with_its_own_frames_first(run_with):
    class Failing:
        metric_names = ()

        def token_loss(self, columns):
            import torch.distributed

            if torch.distributed.get_rank() == 1:
                raise ZeroDivisionError("rank 1 alone")
            return TokenLoss(loss_T=columns.logp_T, clipped_T=columns.mask_T)

    async def scenario(group, pids):
        with pytest.raises(TrainError) as caught:
            await group.update(BATCH, Loss(objective=Failing()), lr=1e-3)
        first, error, innermost, caller, next_one, *_ = str(caught.value).splitlines()
        assert first == f"rank 1 of 2 failed in update, on node {socket.gethostname()}"
        assert error == "    ZeroDivisionError: rank 1 alone"
        assert innermost.startswith(f"      at {__file__}:")
        assert "in token_loss: raise ZeroDivisionError" in innermost
        assert caller.startswith("      at moerl/algorithms/columns.py:")
        assert next_one.startswith("      at moerl/train/loss/batch_loss.py:")
        origin = caught.value.origin
        assert (origin.who, origin.doing) == ("rank 1 of 2", "update")
        assert "micro_batch_loss" in origin.details
        assert Path(origin.log).name == "rank-1.log"
        assert caught.value.exit_code == ExitCode.FAILED

    run_with(scenario, deadlines=DeadlineConfig(settle_seconds=0.5))


def test_what_began_in_another_process_is_not_told_as_the_rank_that_met_it(run_with):
    class Missing:
        metric_names = ()

        def token_loss(self, columns):
            raise StoreError("samples were lost").began_in(Origin(who="a process that receives completions", node="n7", doing=""))

    async def scenario(group, pids):
        with pytest.raises(StoreError, match="samples were lost") as caught:
            await group.update(BATCH, Loss(objective=Missing()), lr=1e-3)
        origin = caught.value.origin
        assert (origin.who, origin.node, origin.doing) == ("a process that receives completions", "n7", "update")

    run_with(scenario, deadlines=DeadlineConfig(settle_seconds=0.5))


def test_a_rank_that_may_open_no_more_files_ends_the_run_as_one_to_be_started_again(run_with):
    class Failing:
        metric_names = ()

        def token_loss(self, columns):
            import resource

            most = len(os.listdir("/proc/self/fd")) - 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            with open("/dev/null"):
                raise AssertionError("it may")

    async def scenario(group, pids):
        with pytest.raises(TrainError, match="Too many open files") as caught:
            await group.update(BATCH, Loss(objective=Failing()), lr=1e-3)
        assert caught.value.exit_code == ExitCode.KILLED

    run_with(scenario, deadlines=DeadlineConfig(settle_seconds=0.5))


def test_a_rank_of_whose_node_ray_lost_the_connection_is_named_before_those_that_lost_it(tmp_path):
    """Ray's words on it are those of a lost peer."""
    unavailable = ActorUnavailableError("The actor is temporarily unavailable: RpcError: RPC error: Socket closed rpc_code: 14", b"1" * 16)
    failures = {0: RuntimeError("Read error [127.0.0.1]:19332: Connection reset by peer"), 1: unavailable}

    async def cause():
        return await RankCalls([None, None], DeadlineConfig(), HangReports(tmp_path))._cause("update", failures)

    found = asyncio.run(cause())
    assert str(found).startswith("rank 1 of 2 failed in update") and str(found).endswith("after it failed: rank 0")
    assert found.exit_code == ExitCode.KILLED


def test_a_node_that_ray_has_lost_is_the_cause_and_not_a_kill_of_the_rank(tmp_path):
    said = "The actor died because its node has died. Node Id: 16f6\n\tthe actor's node was terminated unexpectedly: health check failed"
    lost = ActorDiedError(ActorDiedErrorContext(error_message=said, actor_id=b"1" * 16))

    async def cause():
        return await RankCalls([None], DeadlineConfig(), HangReports(tmp_path))._cause("update", {0: lost})

    found = asyncio.run(cause())
    assert "Ray has lost its node, which was terminated unexpectedly: health check failed" in str(found)
    assert "signal 9" not in str(found) and found.exit_code == ExitCode.KILLED


def test_a_killed_rank_is_named_before_those_that_lost_it_and_a_kill_for_memory_is_recognised(run_with, monkeypatch):
    """The kernel's counter is one more than it was when the rank started."""
    upstream = rank_calls.memory_kills
    monkeypatch.setattr(rank_calls, "memory_kills", lambda counter: upstream(counter) + 1)

    async def scenario(group, pids):
        updating = asyncio.create_task(group.update(LONG_BATCH, SUPERVISED, lr=1e-3))
        await asyncio.to_thread(signal_when, signal.SIGKILL, pids[1], in_second_micro_batch)
        with pytest.raises(TrainError) as caught:
            await updating
        first, died, cause, *rest = str(caught.value).splitlines()
        assert first == f"rank 1 of 2 failed in update, on node {socket.gethostname()}"
        assert died == f"    its process {pids[1]} died without a Python error"
        assert cause == "    it wrote no crash into its log: it was killed from outside, as by signal 9"
        assert rest[0] == "    the kernel killed 1 processes there for lack of memory, probably this one"
        assert rest[-1] == "after it failed: rank 0"
        assert "rank 0 (it lost a peer):" in caught.value.origin.details
        assert caught.value.exit_code == ExitCode.KILLED

    run_with(scenario, deadlines=DeadlineConfig(settle_seconds=60))  # the time that the other rank gets to notice, if the machine is busy


def test_no_rank_is_asked_to_move_where_nothing_leaves_its_device(checkpoints, config, tmp_path):
    group = MegatronTrainGroup(config, model_dir=checkpoints["qwen3_moe"], checkpoint_dir=tmp_path)  # there are no ranks

    async def moved():
        return await group.sleep(), await group.wake(), await group.shed()

    assert asyncio.run(moved()) == (0, 0, 0)


def test_files_of_a_push_are_in_the_directory_of_the_run_where_its_checkpoints_are_a_link(checkpoints, config, tmp_path):
    """Beside what the link leads to they would be those of every run that has a link there."""
    (tmp_path / "run").mkdir()
    (tmp_path / "disk" / "checkpoints-of-run").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk" / "checkpoints-of-run")
    group = MegatronTrainGroup(config, model_dir=checkpoints["qwen3_moe"], checkpoint_dir=tmp_path / "run" / "checkpoints")
    assert group.weight_source.directory == tmp_path / "run" / "push"


def test_a_group_sleeps_between_its_phases_and_refuses_to_work_then(run_with):
    async def scenario(group, pids):
        async with awake(group):
            assert await group.load() == (0, {})
        with pytest.raises(ResidencyError, match=r"^update: the trainer is asleep; legal now: wake$"):
            await group.update(BATCH, SUPERVISED, lr=1e-3)
        async with awake(group):
            stats = await group.update(BATCH, SUPERVISED, lr=1e-3)
            await push_to_one(group)
            await group.save(1, {})
            await group.saved(wait=True)
        async with awake(group):
            assert await group.load() == (1, {"version": 1})
        assert set(stats.memory.device_bytes["asleep"].values()) == {0}
        assert stats.memory.transition_seconds["scoring_to_training"] > 0

    run_with(scenario, offload="all", destroy_groups=True)
