"""What moerl.train.group.TrainGroup promises, for the Megatron group, the oracle and the fake. Tests share one started group."""

import asyncio
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from math import isfinite

import numpy as np
import pytest
from awake import awake
from engine_cases import random_batch, settings
from fake_group import FakeTrainGroup
from hf_trainer import HFTrainGroup

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.config.schema.data_config import RewardConfig, RewardTerm, TinyData
from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ModelConfig
from moerl.config.schema.rollout_config import RolloutConfig, WeightsConfig
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.train.group import MegatronTrainGroup
from moerl.types.errors import ResidencyError, WeightError
from moerl.types.push import TensorSpec
from moerl.weights.installation import Loader
from moerl.weights.plan.buckets import stored_specs
from moerl.weights.push_calls import in_thread
from moerl.weights.sync import WeightSync
from moerl.weights.verify.places import place_of_all
from moerl.weights.weight_session import WeightSession

BUCKET_BYTES, KEEP, LR = 20_000, 1, 1e-3
ALGORITHM, BATCH = algorithm("grpo", "kl_coefficient=0.1"), random_batch()
LOSS = loss_of(ALGORITHM)


def megatron(directory, checkpoint_dir):
    config = RunConfig(
        name="contract",
        num_steps=1,
        groups_per_step=1,
        group_size=2,
        model=ModelConfig(path=str(directory), max_context=32),
        data=TinyData(task="repeat"),
        reward=RewardConfig(terms={"reward": RewardTerm(kind="prefix")}),
        algorithm=ALGORITHM,
        train=TrainConfig(
            optimizer=OptimizerConfig(lr=LR), layout=Layout(ranks=2, ep=2), dtype="float32", micro_batch_tokens=64, offload="all"
        ),
        rollout=RolloutConfig(max_response_tokens=8),
        weights=WeightsConfig(bucket_bytes=BUCKET_BYTES),
        keep_checkpoints=KEEP,
    )
    return MegatronTrainGroup(config, model_dir=directory, checkpoint_dir=checkpoint_dir)


def oracle(directory, checkpoint_dir):
    chosen = settings(directory, Layout(), uses_reference=True)
    return HFTrainGroup(chosen, checkpoint_dir=checkpoint_dir, keep=KEEP, bucket_bytes=BUCKET_BYTES)


def fake(directory, checkpoint_dir):
    with HFCheckpoint(directory) as checkpoint:
        names = ("model.embed_tokens.weight", "model.norm.weight")
        tensors = tuple(TensorSpec(name=name, shape=checkpoint.shape(name), dtype="float32") for name in names)
    return FakeTrainGroup(vocab_size=101, tensors=tensors, checkpoint_dir=checkpoint_dir, keep=KEEP)


@pytest.fixture(scope="module", params=[megatron, oracle, fake], ids=lambda make: make.__name__)
def served(request, checkpoints, tmp_path_factory):
    """A function that runs a scenario, an async function of the group and its checkpoint directory, with the group awake if not told."""
    checkpoint_dir = tmp_path_factory.mktemp("contract")
    if request.param is megatron:
        request.getfixturevalue("connected")
    group = request.param(checkpoints["qwen3_moe"], checkpoint_dir)

    async def run(scenario, *, is_awake):
        async with awake(group) if is_awake else nullcontext():
            return await scenario(group, checkpoint_dir)

    with asyncio.Runner() as runner:
        try:
            runner.run(group.start())
            yield lambda scenario, is_awake=True: runner.run(run(scenario, is_awake=is_awake))
        finally:
            runner.run(group.close())
            runner.run(group.close())


async def update(group, batch=BATCH):
    given = replace(batch, reference_logprobs_T=(await group.reference_logprobs(batch)).get())
    return await group.update(given, LOSS, lr=LR)


class Received:
    """What a rollout server does with a push, for every tensor of the trainer; a WeightReceiver."""

    def __init__(self, specs):
        self.tensors = {}
        self.fails = False
        self._session = WeightSession({spec.name: spec for spec in specs}, Loader(load=self._load, takes_whole=lambda name: True))
        for step in ("connect", "begin", "install"):
            setattr(self, step, partial(in_thread, getattr(self._session, step)))

    async def needs(self):
        return (self._session.needs,)

    async def finish(self, version, push_id):
        await in_thread(self._session.finish, version)

    def _load(self, name, start, tensor):
        if self.fails:
            raise MemoryError("no more")
        self.tensors[name] = tensor
        return [place_of_all(tensor)]


async def receiver_for(group):
    return Received(stored_specs((await group.weight_source.outline()).tensors))


async def pushed(group, version):
    """Every tensor of one push by name, received and verified as a rollout server does."""
    receiver = await receiver_for(group)
    await WeightSync(group.weight_source, {"server": receiver}, transport="ipc").push(version)
    return receiver.tensors


def test_every_token_has_a_logprob_of_the_current_weights(served):
    async def scenario(group, _):
        return (await group.logprobs(BATCH)).get()

    logprobs_T = served(scenario)
    assert (logprobs_T.shape, logprobs_T.dtype) == (BATCH.token_ids_T.shape, np.float32)
    assert (logprobs_T <= 0).all()
    assert (logprobs_T[BATCH.response_mask_T] < 0).all()


def test_an_update_reports_finite_statistics_of_the_response_tokens(served):
    async def scenario(group, _):
        return await update(group)

    stats = served(scenario)
    assert (stats.num_tokens, stats.learning_rate) == (int(BATCH.response_mask_T.sum()), LR)
    values = [getattr(stats, field.name) for field in fields(stats)]
    assert all(isfinite(value) for value in values if isinstance(value, float))
    assert stats.kl_old == 0
    assert stats.entropy > 0
    assert 1 <= stats.rank_imbalance <= stats.round_imbalance
    assert stats.skipped_updates == ()


def test_the_reference_does_not_move(served):
    async def scenario(group, _):
        before = (await group.reference_logprobs(BATCH)).get()
        await update(group)
        return before, (await group.reference_logprobs(BATCH)).get()

    before, after = served(scenario)
    np.testing.assert_array_equal(before, after)


def test_a_checkpoint_brings_back_its_weights_its_version_and_its_state(served):
    async def scenario(group, directory):
        assert await group.load() == (0, {})
        for version in (6, 7):
            await update(group)
            await group.save(version, {"cursor": version * 10})
        assert [saved.version for saved in await group.saved(wait=True)] == [6, 7]
        assert await group.saved(wait=True) == []
        saved_T, straight = (await group.logprobs(BATCH)).get(), await update(group)
        version, state = await group.load()
        assert (version, state["cursor"]) == (7, 70)
        np.testing.assert_array_equal((await group.logprobs(BATCH)).get(), saved_T)
        # The optimizer is back too: the same step again.
        assert await update(group) == straight
        assert len(list(directory.glob("step-*"))) == KEEP

    served(scenario)


def test_a_push_brings_exactly_the_tensors_of_the_manifest_as_they_are_after_the_last_update(served):
    async def scenario(group, _):
        before = await pushed(group, 3)
        await update(group)
        return before, await pushed(group, 4)

    before, after = served(scenario)
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)


def test_a_push_that_failed_leaves_the_trainer_ready_for_everything(served):
    async def scenario(group, _):
        before = await pushed(group, 1)
        receiver = await receiver_for(group)
        receiver.fails = True
        with pytest.raises(WeightError, match="no more"):
            await WeightSync(group.weight_source, {"server": receiver}, transport="ipc").push(2)
        assert (await group.logprobs(BATCH)).get().shape == BATCH.token_ids_T.shape
        return before, await pushed(group, 1)

    before, after = served(scenario)
    assert all(before[name].equal(after[name]) for name in before)


def test_a_sleeping_trainer_refuses_every_verb_until_it_is_awake(served):
    async def scenario(group, _):
        async with awake(group):
            before_T = (await group.logprobs(BATCH)).get()
        with pytest.raises(ResidencyError, match="asleep"):
            (await group.logprobs(BATCH)).get()
        with pytest.raises(ResidencyError, match="asleep"):
            await update(group)
        async with awake(group):
            np.testing.assert_array_equal((await group.logprobs(BATCH)).get(), before_T)
            await update(group)

    served(scenario, is_awake=False)
