"""What the driver hears when ranks fail: real ranks as Ray actors, killed and stopped."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest
import ray
from awake import awake

from moerl.algorithms.sft import SFT
from moerl.config.layout import Layout
from moerl.config.schema import (
    GRPOConfig,
    ModelConfig,
    NetworkConfig,
    RewardConfig,
    RewardTerm,
    RolloutConfig,
    RunConfig,
    TinyData,
    WeightsConfig,
)
from moerl.config.schema_train import OptimizerConfig, TrainConfig
from moerl.train.batch import sft_batch
from moerl.train.group import MegatronTrainGroup
from moerl.types import ConfigError, ResidencyError, TrainError
from moerl.weights.deliveries import stored_specs
from moerl.weights.fleet_plan import plan_deliveries

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
        weights=WeightsConfig(bucket_bytes=20_000),
        network=NetworkConfig(variables={"NCCL_DEBUG": "WARN"}),
    )

    def run(scenario, *, interface="lo", **changes):
        network = replace(config.network, interface=interface)
        changed = replace(config, train=replace(config.train, **changes), network=network)
        group = MegatronTrainGroup(changed, model_dir=checkpoints["qwen3_moe"], checkpoint_dir=tmp_path)

        async def whole():
            try:
                await group.start()
                await scenario(group, [await worker.process_id.remote() for worker in group._workers])
            finally:
                await group.close()

        asyncio.run(whole())

    return run


async def start_push(group):
    """The ranks know what they send, and have digested it; their jobs."""
    source = group.weight_source
    outline = await source.outline()
    names = tuple(spec.name for spec in stored_specs(outline.tensors))
    found = plan_deliveries(outline, {"server": (names,)})
    await source.listen("shm", found.jobs)
    await source.digests()
    return found.jobs


async def pack_all(group, jobs):
    for rank, job in jobs.items():
        for bucket in job:
            assert (await group.weight_source.pack(rank, bucket.index)).num_bytes == bucket.num_bytes
    await group.weight_source.finish()


def test_a_rank_that_dies_during_a_push_is_named_and_the_others_are_in_no_collective(run_with):
    async def scenario(group, pids):
        jobs = await start_push(group)
        assert set(jobs) == {0, 1}
        os.kill(pids[1], signal.SIGKILL)
        assert (await group.weight_source.pack(0, 0)).index == 0
        with pytest.raises(TrainError, match=r"^rank 1 failed in pack:\n.*actor died"):
            await group.weight_source.pack(1, 0)
        assert (await group.weight_source.pack(0, 1)).index == 1

    run_with(scenario)


def test_ranks_meet_over_the_network_that_the_run_names(run_with):
    async def scenario(group, pids):
        # What they were told at the start is in their environment, which is kept; variables of the run are set in any case.
        assert await group._all("use_network", group._config.network) == [{"NCCL_DEBUG": "WARN"}] * 2
        assert await group._all("use_network", NetworkConfig(interface="lo")) == [{}] * 2
        stats = await group.update(BATCH, SFT(), lr=1e-3)
        assert stats.num_tokens == 5

    run_with(scenario)


def test_an_interface_that_a_node_does_not_have_is_refused_before_ranks_meet(run_with):
    async def scenario(group, pids):
        raise AssertionError("it must not start")

    with pytest.raises(ConfigError, match=r"network\.interface = 'nope0': is not an interface of"):
        run_with(scenario, interface="nope0")


def test_ranks_that_do_not_answer_are_named_at_the_deadline(run_with):
    async def scenario(group, pids):
        stats = await group.update(BATCH, SFT(), lr=1e-3)
        assert stats.num_tokens == 5
        os.kill(pids[1], signal.SIGSTOP)
        group._config = replace(group._config, train=replace(group._config.train, phase_seconds=2))
        with pytest.raises(TrainError, match=r"^update: ranks \[0, 1\] of 2 did not answer within 2 s$"):
            await group.update(BATCH, SFT(), lr=1e-3)

    run_with(scenario)


def test_a_group_sleeps_between_its_phases_and_refuses_to_work_then(run_with):
    async def scenario(group, pids):
        async with awake(group):
            assert await group.load() == (0, {})
        with pytest.raises(ResidencyError, match=r"^update: the trainer is asleep; legal now: wake$"):
            await group.update(BATCH, SFT(), lr=1e-3)
        async with awake(group):
            stats = await group.update(BATCH, SFT(), lr=1e-3)
            await pack_all(group, await start_push(group))
            await group.save(1, {})
        async with awake(group):
            assert await group.load() == (1, {"version": 1})
        assert set(stats.memory.device_bytes["asleep"].values()) == {0}
        assert stats.memory.transition_seconds["scoring_to_training"] > 0

    run_with(scenario, offload="all", destroy_groups=True)
