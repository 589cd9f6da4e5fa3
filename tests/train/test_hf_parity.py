"""Megatron computes what transformers computes from the same checkpoint, forward, backward and through the optimizer."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from engine_cases import LAYOUTS, random_batch, settings
from engine_jobs import Trained, train
from engine_ranks import run_ranks
from hf_trainer import HFTrainGroup

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.config.schema.layout import Layout

STATISTICS = ("loss", "entropy", "kl_old", "kl_reference", "clip_fraction", "mismatch_mean", "mismatch_max", "mismatch_kl")


def train_plainly(chosen, batch, num_steps=3, num_updates=2):
    """What engine_jobs.train does, by the oracle."""
    chosen = replace(chosen, train=replace(chosen.train, updates_per_step=num_updates))

    async def scenario():
        group = HFTrainGroup(chosen, checkpoint_dir=chosen.model_dir)
        await group.start()
        objective = loss_of(algorithm("grpo", f"kl_coefficient={0.1 if chosen.uses_reference else 0.0}"))
        before_T, steps, given = (await group.logprobs(batch)).get(), [], batch
        for _ in range(num_steps):
            if chosen.uses_reference:
                given = replace(batch, reference_logprobs_T=(await group.reference_logprobs(batch)).get())
            steps.append(await group.update(given, objective, lr=chosen.train.optimizer.lr))
        weights = {name: tensor.float().numpy() for name, tensor in group.weights().items()}
        reference_T = (await group.reference_logprobs(batch)).get() if chosen.uses_reference else None
        return Trained(
            before_T=before_T, after_T=(await group.logprobs(batch)).get(), reference_T=reference_T, steps=steps, weights=weights
        )

    return asyncio.run(scenario())


def assert_same_training(result, expected, *, rel, atol):
    """`atol` of log-probs and weights, which have sizes near 1; `rel` of statistics."""
    np.testing.assert_allclose(result.before_T, expected.before_T, atol=atol, rtol=0)
    np.testing.assert_allclose(result.after_T, expected.after_T, atol=10 * atol, rtol=0)
    for step, wanted in zip(result.steps, expected.steps, strict=True):
        for name in STATISTICS:
            value, expected_value = getattr(step, name), getattr(wanted, name)
            assert value is expected_value or value == pytest.approx(expected_value, rel=rel, abs=1e-8), name
        assert step.grad_norm == pytest.approx(wanted.grad_norm, rel=rel)
        assert (step.num_tokens, step.learning_rate) == (wanted.num_tokens, wanted.learning_rate)
    assert result.weights.keys() == expected.weights.keys()
    for name, weight in result.weights.items():
        np.testing.assert_allclose(weight, expected.weights[name], atol=atol, rtol=0, err_msg=name)


TOLERANCES = {"float32": {"rel": 1e-4, "atol": 2e-5}, "float64": {"rel": 1e-6, "atol": 1e-6}}
"""float64: the norm, rotary angles and the columns of a batch are float32 in both, weights are compared in it."""


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("name", "layout"), [("qwen3", "one"), ("qwen3_moe", "one"), ("untied-qwen3", "tp2"), ("untied-qwen3_moe", "tp2")])
def test_three_grpo_steps_equal_transformers_with_adamw(name, layout, dtype, checkpoints):
    chosen = settings(checkpoints[name], Layout() if layout == "one" else LAYOUTS[layout], dtype=dtype, uses_reference=True)
    result = run_ranks(train, chosen.train.layout.ranks, chosen, random_batch())
    expected = train_plainly(chosen, random_batch())
    assert expected.before_T.dtype == result.before_T.dtype == dtype
    assert_same_training(result, expected, **TOLERANCES[dtype])
    np.testing.assert_array_equal(expected.reference_T, expected.before_T)


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_the_temperature_divides_the_logits(temperature, checkpoints):
    chosen = settings(checkpoints["untied-qwen3_moe"], Layout(), temperature=temperature)
    expected = train_plainly(chosen, random_batch(), 1, 1)
    assert_same_training(run_ranks(train, 1, chosen, random_batch(), 1, 1), expected, **TOLERANCES["float32"])


def test_old_logprobs_of_another_policy_are_clipped_alike(checkpoints):
    """Far from the policy in both directions, so that tokens are clipped, some with each sign of the advantage."""
    chosen, batch = settings(checkpoints["qwen3"], Layout(), dtype="float64"), random_batch()
    noise_T = np.random.default_rng(1).normal(size=len(batch.token_ids_T)).astype(np.float32) * 0.3
    batch = replace(batch, old_logprobs_T=train_plainly(chosen, batch, 0).before_T.astype(np.float32) + noise_T)
    result, expected = run_ranks(train, 1, chosen, batch, 1, 1), train_plainly(chosen, batch, 1, 1)
    assert 0.1 < expected.steps[0].clip_fraction < 0.9
    assert_same_training(result, expected, **TOLERANCES["float64"])


def test_the_first_token_of_a_sequence_has_no_logprob_and_sequences_do_not_see_each_other(checkpoints):
    """The same sequences in another order and in other company have the same log-probs."""
    directory, batch = checkpoints["untied-qwen3_moe"], random_batch()
    order = list(reversed(range(batch.num_sequences)))[:-1]
    forward, backward = (
        run_ranks(train, 1, settings(directory, Layout(), micro_batch_tokens=tokens), ordered, 0).before_T
        for tokens, ordered in ((64, batch), (4096, batch.select(order)))
    )
    expected_T = np.concatenate([forward[batch.offsets[i] : batch.offsets[i + 1]] for i in order])
    np.testing.assert_allclose(backward, expected_T, atol=1e-5, rtol=0)
    assert (forward[batch.offsets[:-1]] == 0).all()
