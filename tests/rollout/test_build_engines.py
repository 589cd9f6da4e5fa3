"""From a run's configuration to its engines."""

import asyncio
import dataclasses

import pytest
from tiny_servers import push

from moerl.cluster.run_secret import RunSecret
from moerl.config.algorithm_settings import algorithm
from moerl.config.schema.data_config import RewardConfig, RewardTerm, TinyData
from moerl.config.schema.model_config import ModelConfig
from moerl.config.schema.rollout_config import RolloutConfig
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
from moerl.rollout.build_engines import build_engines
from moerl.types.completion import SamplingParams
from moerl.types.engine_traits import TRAITS


def config(*, deterministic=False, **rollout):
    return RunConfig(
        name="run",
        num_steps=1,
        groups_per_step=1,
        group_size=2,
        model=ModelConfig(path="unused", max_context=128),
        data=TinyData(task="repeat"),
        reward=RewardConfig(terms={"exact": RewardTerm(kind="exact")}),
        algorithm=algorithm("grpo"),
        train=TrainConfig(optimizer=OptimizerConfig(lr=1e-3), dtype="float32"),
        rollout=RolloutConfig(max_response_tokens=16, **rollout),
        deterministic=deterministic,
    )


def test_every_engine_of_the_configuration_has_traits():
    field = next(field for field in dataclasses.fields(RolloutConfig) if field.name == "engine")
    assert set(TRAITS) == set(field.type.__args__)


@pytest.mark.parametrize("engine", ["hf", "fake"])
def test_built_engines_serve_the_checkpoints_model_after_a_push(run, checkpoints, tmp_path, engine):
    checkpoint = checkpoints["moe"]
    built = config(engine=engine, num_servers=1, max_running=8, prefill_chunk=16, deterministic=True)
    (server,) = build_engines(built, checkpoint.directory, tmp_path, RunSecret.new())

    async def scenario():
        await server.start()
        try:
            stale = await server.health()
            await push(server, checkpoint.tensors, 5)
            completions = [server.generate((4, 9), SamplingParams(max_tokens=6, seed=i), f"r{i}") for i in range(10)]
            return stale, await asyncio.gather(*completions)
        finally:
            await server.close()

    stale, completions = run(scenario())
    assert (stale.status, stale.version, stale.reason) == ("stale", None, "no weights were pushed yet")
    assert {span.version for completion in completions for span in completion.spans} == {5}


def test_fixed_ports_count_up_and_port_zero_stays_zero(tmp_path):
    fixed = build_engines(config(num_servers=3, port=8000), tmp_path, tmp_path, RunSecret.new())
    free = build_engines(config(num_servers=3), tmp_path, tmp_path, RunSecret.new())
    assert [engine.name for engine in fixed] == ["127.0.0.1:8000", "127.0.0.1:8001", "127.0.0.1:8002"]
    assert {engine.name for engine in free} == {"127.0.0.1:0"}
