"""A loss or gradient that is not finite changes no weight, and the message names the samples that caused it."""

from dataclasses import replace

import numpy as np
import pytest
from checkpoint_jobs import load_and_continue, save_refused
from engine_cases import LAYOUTS, random_batch, settings
from engine_jobs import clipped_updates, train
from engine_ranks import run_ranks
from family_cases import BUILT, write_case

from moerl.config.schema.layout import Layout


def poisoned(value, *samples):
    """A batch in which the last token of each named sample has this advantage."""
    batch = random_batch()
    advantages_T = batch.advantages_T.copy()
    for sample in samples:
        advantages_T[batch.offsets[sample + 1] - 1] = value
    return replace(batch, advantages_T=advantages_T)


@pytest.mark.parametrize("layout", [Layout(), *(LAYOUTS[name] for name in ("tp2-ep2-dp2", "pp2-vpp2", "cp2-ep2"))], ids=str)
def test_the_samples_at_fault_are_named_and_the_weights_stay(layout, checkpoints):
    chosen = settings(checkpoints["qwen3_moe"], layout)
    result = run_ranks(train, layout.ranks, chosen, poisoned(np.nan, 3, 9), 1, 1)
    untouched = run_ranks(train, 1, settings(checkpoints["qwen3_moe"], Layout()), random_batch(), 0)
    [trouble] = result.steps[0].skipped_updates
    named = {part.split(":")[0].split("samples ")[1] for part in trouble.split("; ")}
    assert named == {"3", "9"}, trouble
    assert "loss is not finite" in trouble or "gradient of" in trouble
    for name, weight in result.weights.items():
        np.testing.assert_array_equal(weight, untouched.weights[name])


@pytest.mark.skipif("deepseek_v32" not in BUILT, reason="this version of Megatron has no indexers")
def test_the_samples_at_fault_are_named_beside_weights_that_are_not_trained(tmp_path):
    """They have no gradient to look at."""
    chosen = settings(write_case("deepseek_v32", tmp_path), Layout())
    [step] = run_ranks(train, 1, chosen, poisoned(np.nan, 3), 1, 1).steps
    [trouble] = step.skipped_updates
    assert trouble.endswith("samples 3: loss is not finite")


def test_a_gradient_that_overflows_is_named_by_its_parameter(checkpoints):
    """One token, so that nothing divides what the output layer's gradient multiplies by a normalized state."""
    batch = poisoned(3e38, 5).select(np.array([5]))
    batch = replace(batch, response_mask_T=batch.response_mask_T & (batch.advantages_T == np.float32(3e38)))
    result = run_ranks(train, 1, settings(checkpoints["qwen3_moe"], Layout()), batch, 1, 1)
    [trouble] = result.steps[0].skipped_updates
    assert "samples 0: gradient of" in trouble


def test_a_norm_that_overflows_is_told_from_a_gradient_that_does(checkpoints):
    result = run_ranks(train, 1, settings(checkpoints["qwen3_moe"], Layout()), poisoned(1e30, 5), 1, 1)
    [trouble] = result.steps[0].skipped_updates
    assert "sum of squares in the gradient norm" in trouble


def test_a_norm_is_taken_once_to_look_for_nan_and_to_clip_by(checkpoints):
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS["ep2"])
    optimizer = replace(chosen.train.optimizer, clip_grad=1e-3)
    chosen = replace(chosen, train=replace(chosen.train, optimizer=optimizer))
    num_asked, grad_norm, clipped = run_ranks(clipped_updates, 2, chosen, random_batch(), 2)
    assert num_asked == 2
    assert grad_norm > 1e-2
    for update in np.split(np.array(clipped), 2):
        assert np.linalg.norm(update) == pytest.approx(1e-3, rel=1e-4)


def test_the_other_mini_batches_are_applied_and_counted_alone(checkpoints):
    """Two updates; sample 12 is in the second, which changes nothing: the first alone gives the same weights."""
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS["ep2"])
    batch = random_batch()
    result = run_ranks(train, 2, chosen, poisoned(np.nan, 12), 1, 2)
    first_half = batch.select(np.arange(7))
    expected = run_ranks(train, 2, chosen, first_half, 1, 1)
    assert len(result.steps[0].skipped_updates) == 1
    assert result.steps[0].loss == pytest.approx(expected.steps[0].loss, rel=1e-6)
    assert result.steps[0].num_tokens == expected.steps[0].num_tokens
    for name, weight in result.weights.items():
        np.testing.assert_allclose(weight, expected.weights[name], atol=1e-7, rtol=0)


@pytest.mark.parametrize("layout", [LAYOUTS[name] for name in ("pp2-vpp2", "cp2-ep2")], ids=str)
def test_an_update_with_tokens_of_other_weights_than_their_server_says_changes_nothing(layout, checkpoints):
    """Two updates: the first compares, and neither is applied."""
    batch = random_batch(num_sequences=26, with_servers=True)
    chosen = settings(checkpoints["qwen3_moe"], layout, mismatch_limit=0.01)
    result = run_ranks(train, layout.ranks, chosen, batch, 1, 2)
    untouched = run_ranks(train, 1, settings(checkpoints["qwen3_moe"], Layout()), batch, 0)
    servers = result.steps[0].server_mismatch
    assert [server.num_tokens for server in servers] == np.bincount(batch.select(np.arange(13)).server_T + 1, minlength=3)[1:].tolist()
    difference_T = np.abs(untouched.before_T - batch.rollout_logprobs_T)
    first_T = np.arange(len(difference_T)) < batch.offsets[13]
    for number, server in enumerate(servers):
        assert server.mean == pytest.approx(difference_T[first_T & (batch.server_T == number)].mean(), rel=1e-4)
    for name, weight in result.weights.items():
        np.testing.assert_array_equal(weight, untouched.weights[name])


def test_a_run_whose_first_update_was_not_applied_is_saved_and_goes_on_as_if_it_began(tmp_path, checkpoints):
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS["ep2"])
    straight = run_ranks(save_refused, 2, chosen, poisoned(np.nan, 3), random_batch(), tmp_path)
    again = run_ranks(load_and_continue, 2, chosen, random_batch(), tmp_path)
    assert again.steps == straight.steps
    for name, weight in again.weights.items():
        np.testing.assert_array_equal(weight, straight.weights[name])
