"""A policy that has not moved has no KL to itself, to the bit: the guard of the first step stops a run on anything but 0."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from engine_cases import settings, write_checkpoints
from engine_ranks import run_ranks
from old_logprob_jobs import first_steps, taught_beside_the_response

from moerl.config.schema.layout import Layout
from moerl.types.batch import TrainBatch

LAYOUTS = {"dp1": Layout(), "dp2": Layout(ranks=2), "ep2": Layout(ranks=2, ep=2)}
LONGEST_ANSWERS = (8, 40, 100)
CASES = [*product(("float32", "bfloat16"), (2, 3), ("off",)), ("float32", 3, "trainer")]
"""dtype, updates per step, train.router_replay: a model each."""


def batch_of_answers(longest):
    """Answers of 1 to `longest` tokens to prompts of 2 to 6. Long ones are few: most micro-batches of 112 tokens take several."""
    rng = np.random.default_rng(longest)
    answers = np.concatenate([[1, longest], rng.integers(1, longest + 1, size=7 + 160 // longest)])
    prompts = rng.integers(2, 7, size=len(answers))
    offsets = np.concatenate([[0], np.cumsum(prompts + answers)])
    total = int(offsets[-1])
    mask_T = np.ones(total, dtype=bool)
    for start, length in zip(offsets, prompts, strict=False):
        mask_T[start : start + length] = False
    return TrainBatch(
        token_ids_T=rng.integers(5, 90, size=total),
        response_mask_T=mask_T,
        rollout_logprobs_T=np.full(total, -4.5, dtype=np.float32),
        advantages_T=rng.normal(size=total).astype(np.float32),
        offsets=offsets,
    )


def settings_of(directory, layout, dtype, num_updates, replay):
    made = settings(directory, LAYOUTS[layout], dtype=dtype, micro_batch_tokens=112, max_context=128, uses_reference=True)
    return replace(made, train=replace(made.train, updates_per_step=num_updates, router_replay=replay))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))["qwen3_moe"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_old_log_probs_are_those_of_the_first_mini_batch_to_the_bit(layout, directory):
    chosen = [settings_of(directory, layout, *case) for case in CASES]
    batches = [batch_of_answers(longest) for longest in LONGEST_ANSWERS]
    found = run_ranks(first_steps, LAYOUTS[layout].ranks, chosen, batches)
    assert dict(zip(CASES, found, strict=True)) == dict.fromkeys(CASES, [(0.0, 0.0)] * len(batches))


def test_a_teacher_is_asked_about_all_that_it_teaches(directory):
    """Words of a tool as well; the policy is its own teacher here, and as near as can be."""
    teacher_T, policy_T, distance = run_ranks(taught_beside_the_response, 1, settings(directory, Layout()))
    taught_T = teacher_T != 0
    assert taught_T.sum() == 10  # five tokens of each sample
    drawn_T = policy_T != 0
    np.testing.assert_allclose(teacher_T[drawn_T], policy_T[drawn_T], atol=1e-5)
    assert abs(distance) < 1e-5
