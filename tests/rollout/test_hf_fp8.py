"""The hf server takes weights in blocks of FP8, and computes with what they stand for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import torch
from test_build_engines import config
from test_contract import ask
from tiny_servers import Served, as_pairs, hf_engine, push, values_of

from moerl.cluster.run_secret import RunSecret
from moerl.config.schema.rollout_config import ServerLayout
from moerl.models import fp8_names
from moerl.rollout.build_engines import build_engines
from moerl.rollout.engines.hf.fp8_weights import FP8Weights
from moerl.types.errors import WeightError
from moerl.weights.plan.fp8_pairs import in_fp8
from moerl.weights.plan.spec_tensors import spec_of

pytestmark = pytest.mark.usefixtures("forked")

NAME = "model.layers.0.self_attn.q_proj.weight"
SCALES = NAME + fp8_names.SCALE_SUFFIX


@contextlib.asynccontextmanager
async def a_server(checkpoint, log_path) -> AsyncIterator[Served]:
    engine = hf_engine(checkpoint.directory, log_path, "--deterministic", "--fp8-weights")
    await engine.start()
    try:
        yield Served(engine=engine, tensors=checkpoint.tensors)
    finally:
        await engine.close()


def test_a_server_answers_as_one_with_the_values_of_the_pairs(run, served_moe, checkpoints, tmp_path):
    async def scenario():
        async with a_server(checkpoints["moe"], tmp_path / "log") as served:
            for version, factor in ((1, 1.0), (2, 0.75)):
                pairs = as_pairs({name: tensor * factor for name, tensor in served_moe.tensors.items()})
                await push(served.engine, pairs, version)
            await push(served_moe.engine, values_of(pairs), 2)
            answers = await asyncio.gather(ask(served, "a"), ask(served_moe, "a"))
            with pytest.raises(WeightError, match=SCALES):
                await push(served.engine, pairs, 3, damaged=SCALES)
            with pytest.raises(WeightError, match="missing: .*_scale_inv"):
                await push(served.engine, served_moe.tensors, 4)
            return answers

    ours, theirs = run(scenario())
    assert ours == theirs


@pytest.mark.parametrize("order", [(NAME, SCALES), (SCALES, NAME)])
def test_either_half_of_a_pair_may_come_first_in_every_push(order):
    views = {NAME: torch.zeros(130, 200)}
    weights = FP8Weights(views, in_fp8([spec_of(NAME, views[NAME])]))
    for factor in (1, 7):
        pairs = as_pairs({NAME: torch.randn(130, 200, generator=torch.Generator().manual_seed(factor)) * factor})
        for name in order:
            (place,) = weights.load(name, (0, 0), pairs[name])
            assert torch.equal(place.target.view(torch.uint8), pairs[name].view(torch.uint8))
            assert torch.equal(weights.read(name).view(torch.uint8), pairs[name].view(torch.uint8))
        assert torch.equal(views[NAME], values_of(pairs)[NAME])


def test_a_model_that_does_not_keep_what_was_installed_is_refused():
    views = {NAME: torch.zeros(300).as_strided((2, 200), (100, 1))}  # its rows overlap
    weights = FP8Weights(views, in_fp8([spec_of(NAME, views[NAME])]))
    pairs = as_pairs({NAME: torch.arange(400.0).reshape(2, 200)})
    weights.load(NAME, (0, 0), pairs[NAME])
    with pytest.raises(WeightError, match="does not hold what its blocks of FP8"):
        weights.load(SCALES, (0, 0), pairs[SCALES])


@pytest.mark.parametrize("engine", ["fake", "hf"])
def test_servers_of_a_run_in_fp8_take_pairs(run, checkpoints, tmp_path, engine):
    checkpoint = checkpoints["moe"]
    (server,) = build_engines(config(engine=engine, layout=ServerLayout(weights="fp8")), checkpoint.directory, tmp_path, RunSecret.new())

    async def scenario():
        await server.start()
        try:
            await push(server, as_pairs(checkpoint.tensors), 5)
            return await server.health()
        finally:
            await server.close()

    assert run(scenario()).version == 5
