"""bfloat16 with float32 master weights and gradients, and FP8 matrix products in training steps."""

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import LAYOUTS, random_batch, settings
from engine_jobs import first_step, train
from engine_ranks import run_ranks
from precision_jobs import many_tiny_steps, summed_gradient

from moerl.config.layout import Layout
from moerl.config.schema import FP8Config, ScratchModel
from moerl.models.scratch import write_scratch_model

RECIPES = ("blockwise", "tensorwise", "mxfp8")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose sizes FP8 divides."""
    directory = tmp_path_factory.mktemp("wide") / "model"
    sizes = dict(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=64)
    write_scratch_model(ScratchModel(family="qwen3_moe", **sizes), 32, directory, seed=0)
    return directory


def chosen(directory, layout, fp8, dtype="bfloat16", **megatron):
    plain = settings(directory, layout, dtype=dtype, micro_batch_tokens=128)
    return replace(plain, train=replace(plain.train, fp8=fp8, megatron=megatron))


@pytest.fixture(scope="module")
def in_bfloat16(wide):
    return run_ranks(train, 1, chosen(wide, Layout(), None), random_batch())


@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_stays_near_bfloat16_and_is_really_on(recipe, form, wide, in_bfloat16):
    result = run_ranks(train, 1, chosen(wide, Layout(), FP8Config(recipe=recipe, format=form)), random_batch())
    difference = np.abs(result.before_T - in_bfloat16.before_T)
    assert 1e-5 < difference.mean() < 0.02
    ratio = result.steps[0].grad_norm / in_bfloat16.steps[0].grad_norm
    assert 1e-5 < abs(ratio - 1) < 0.05
    assert result.steps[-1].entropy == pytest.approx(in_bfloat16.steps[-1].entropy, rel=0.02)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["ep2", "tp2", "pp2", "cp2"])
def test_a_recipe_under_a_layout_stays_near_one_process(name, recipe, wide):
    """Not equal: shards cut the blocks elsewhere, and one scale for a whole tensor covers other tokens and columns."""
    fp8 = FP8Config(recipe=recipe)
    expected = run_ranks(first_step, 1, chosen(wide, Layout(), fp8), random_batch())
    result = run_ranks(first_step, LAYOUTS[name].ranks, chosen(wide, LAYOUTS[name], fp8), random_batch())
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=0.03)
    assert result.entropy == pytest.approx(expected.entropy, rel=1e-3)


def test_layers_at_both_ends_can_stay_in_bfloat16(wide, in_bfloat16):
    """All of them: nothing is left in FP8."""
    fp8 = FP8Config(recipe="blockwise", first_layers_bf16=1, last_layers_bf16=1)
    result = run_ranks(train, 1, chosen(wide, Layout(), fp8), random_batch())
    np.testing.assert_array_equal(result.before_T, in_bfloat16.before_T)
    some = run_ranks(train, 1, chosen(wide, Layout(), replace(fp8, last_layers_bf16=0)), random_batch())
    assert np.abs(some.before_T - in_bfloat16.before_T).max() > 0


def test_recomputed_layers_are_rounded_again_alike(wide):
    plain = run_ranks(first_step, 1, chosen(wide, Layout(), FP8Config(recipe="blockwise")), random_batch())
    recompute = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    again = run_ranks(first_step, 1, chosen(wide, Layout(), FP8Config(recipe="blockwise"), **recompute), random_batch())
    assert (again.loss, again.grad_norm) == (plain.loss, plain.grad_norm)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_micro_batches_are_padded_to_what_the_recipe_divides_and_padding_changes_no_loss(recipe, wide):
    batch = random_batch(num_sequences=3)
    fp8 = FP8Config(recipe=recipe)
    result = run_ranks(train, 4, chosen(wide, LAYOUTS["tp2-cp2"], fp8), batch, 1, 1)
    padded = -(-len(batch.token_ids_T) // (fp8.alignment * 4)) * fp8.alignment * 4
    assert result.steps[0].padding_fraction == pytest.approx(1 - len(batch.token_ids_T) / padded)
    expected = run_ranks(train, 1, chosen(wide, Layout(), None), batch, 1, 1)
    assert result.steps[0].num_tokens == expected.steps[0].num_tokens
    assert result.steps[0].entropy == pytest.approx(expected.steps[0].entropy, rel=1e-3)


@pytest.mark.parametrize("name", ["one", "ep2"])
def test_updates_too_small_for_bfloat16_are_kept_in_the_master_weights(name, wide):
    """Each step alone rounds to nothing in bfloat16; a hundred of them do not."""
    layout = Layout() if name == "one" else LAYOUTS[name]
    master_change, first_change, last_change = run_ranks(many_tiny_steps, layout.ranks, chosen(wide, layout, None), random_batch(), 100)
    assert master_change > 0
    assert first_change < 0.1 * master_change
    assert last_change > 0.5


def test_gradients_of_many_micro_batches_are_added_in_float32(wide):
    """One micro-batch counted 256 times too large a sum for bfloat16's 8 bits: adding one more would change nothing there."""
    error, error_in_bfloat16 = run_ranks(summed_gradient, 1, chosen(wide, Layout(), None), random_batch(num_sequences=1), 300)
    assert error < 1e-4
    assert error_in_bfloat16 > 1e-2
