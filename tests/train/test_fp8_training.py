"""Training with every FP8 recipe: really on, close to bfloat16, padded as the recipe needs, and the same under every layout."""

import fp8_training_jobs as jobs
import numpy as np
import pytest
from engine_cases import LAYOUTS, random_batch
from engine_jobs import train
from engine_ranks import RankError, run_ranks
from fp8_cases import fp8_settings, write_fp8_checkpoint

from moerl.config.schema.train_config import FullRecompute, SelectiveRecompute

RECIPES = ("blockwise", "tensorwise", "delayed", "mxfp8")
PER_RANK = {"blockwise": 128, "tensorwise": 16, "delayed": 16, "mxfp8": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_fp8_checkpoint(tmp_path_factory.mktemp("fp8") / "model")


@pytest.fixture(scope="module")
def trained(model):
    """Two steps of one process, by recipe and dtype; each computed when first asked for."""
    known = {}

    def of(recipe, dtype="bfloat16", **options):
        key = (str(recipe), dtype, *sorted(options.items()))
        if key not in known:
            known[key] = run_ranks(train, 1, fp8_settings(model, recipe=recipe, dtype=dtype, **options), random_batch(), 2, 1)
        return known[key]

    return of


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_on_and_stays_close_to_bfloat16(recipe, trained):
    """Measured: log-probs differ by 0.08 to 0.09 on average (bfloat16 from float32 by 0.01), first gradient norms by 0.5 to 2.5 %."""
    result, plain = trained(recipe, format="hybrid"), trained(None)
    distance = np.abs(result.before_T - plain.before_T).mean()
    assert 0.02 < distance < 0.15
    for step, wanted in zip(result.steps, plain.steps, strict=True):
        assert step.grad_norm != wanted.grad_norm
        assert step.grad_norm == pytest.approx(wanted.grad_norm, rel=0.1)
    assert np.abs(result.after_T - plain.after_T).mean() < 0.3
    # Training went the same way: the step taken agrees with the one of bfloat16.
    step, wanted = result.after_T - result.before_T, plain.after_T - plain.before_T
    assert np.corrcoef(step, wanted)[0, 1] > 0.8


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_gradients_in_e5m2_are_coarser_and_change_nothing_before_the_first_step(recipe, trained):
    fine, coarse = trained(recipe, format="e4m3"), trained(recipe, format="hybrid")
    np.testing.assert_array_equal(fine.before_T, coarse.before_T)
    assert fine.steps[0].grad_norm != coarse.steps[0].grad_norm


def test_every_linear_layer_of_the_decoder_uses_fp8_and_nothing_else_does(model):
    seen, others = run_ranks(jobs.names_in_fp8, 1, fp8_settings(model, recipe="blockwise"), random_batch())
    assert {name for name in others if "router" not in name} == {"embedding.word_embeddings.weight"}
    parts = {"self_attention.linear_qkv", "self_attention.linear_proj", "mlp.experts.linear_fc1", "mlp.experts.linear_fc2"}
    assert {name.split(".", 3)[3].rsplit(".", 1)[0] for name in seen} == parts
    assert {name.split(".")[2] for name in seen} == {"0", "1"}


@pytest.mark.parametrize(("ends", "in_fp8"), [({"first_layers_bf16": 1}, {"1"}), ({"last_layers_bf16": 1}, {"0"})])
def test_layers_at_the_ends_stay_in_bfloat16(ends, in_fp8, model):
    seen, _ = run_ranks(jobs.names_in_fp8, 1, fp8_settings(model, recipe="blockwise", **ends), random_batch())
    assert {name.split(".")[2] for name in seen} == in_fp8


@pytest.mark.parametrize("name", ["tp2", "tp2-ep2", "cp2", "pp2"])
def test_blockwise_equals_one_process(name, model, trained):
    """In float32 around the products, so that only their operands are rounded.

    Blocks of activations lie along a token, those of weights in whole shards, and the scales are powers of two, which round a value the
    same whatever its neighbours are. So a layout changes sums in float32 alone. The bound is tight for the first pass and gradient; an
    update of Adam then turns 1e-7 into a value on the other side of an FP8 step now and then, one part in 16 of that value.
    """
    settings = fp8_settings(model, LAYOUTS[name], recipe="blockwise", dtype="float32")
    result, expected = run_ranks(train, settings.train.layout.ranks, settings, random_batch(), 2, 1), trained("blockwise", "float32")
    np.testing.assert_allclose(result.before_T, expected.before_T, atol=1e-5, rtol=0)
    assert result.steps[0].grad_norm == pytest.approx(expected.steps[0].grad_norm, rel=1e-5)
    assert result.steps[1].grad_norm == pytest.approx(expected.steps[1].grad_norm, rel=5e-3)
    assert np.abs(result.after_T - expected.after_T).mean() < 0.05
    assert np.abs(expected.before_T - trained(None, "float32").before_T).mean() > 0.02


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8"])
def test_the_other_recipes_run_with_everything_cut(recipe, model, trained):
    """One scale per tensor depends on what a rank holds: bounded by the distance from bfloat16 itself."""
    settings = fp8_settings(model, LAYOUTS["tp2-ep2"], recipe=recipe, format="hybrid")
    result, expected = run_ranks(train, 2, settings, random_batch(), 2, 1), trained(recipe, format="hybrid")
    assert np.abs(result.before_T - expected.before_T).mean() < 0.15
    for step, wanted in zip(result.steps, expected.steps, strict=True):
        assert step.grad_norm == pytest.approx(wanted.grad_norm, rel=0.1)


@pytest.mark.parametrize(("recipe", "name"), [("blockwise", "tp2"), ("blockwise", "cp2"), ("mxfp8", "tp2"), ("tensorwise", "cp2")])
def test_every_rank_has_whole_blocks_of_tokens(recipe, name, model):
    before, products = run_ranks(jobs.rank_tokens, 2, fp8_settings(model, LAYOUTS[name], recipe=recipe), random_batch())
    assert all(tokens % PER_RANK[recipe] == 0 for tokens in before)
    assert all(rows % (32 if recipe == "mxfp8" else 16) == 0 for rows in products)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_padding_changes_neither_log_probs_nor_loss_nor_gradients(recipe, model):
    """Scales of a token's activations are its own. Padding does share the blocks of weight gradients, where its gradients are 0."""
    settings = fp8_settings(model, recipe=recipe, dtype="float32")
    (short_T, *short), (long_T, *long) = (run_ranks(jobs.padded_to, 1, settings, random_batch(), multiple) for multiple in (128, 512))
    np.testing.assert_allclose(long_T, short_T, atol=1e-5, rtol=0)
    assert long == pytest.approx(short, rel=1e-5)


def test_padding_may_move_the_scale_of_a_whole_tensor(model):
    """Its activations count for the largest value; stated, and bounded by what the recipe itself costs."""
    settings = fp8_settings(model, recipe="tensorwise", dtype="float32")
    (short_T, *short), (long_T, *long) = (run_ranks(jobs.padded_to, 1, settings, random_batch(), multiple) for multiple in (16, 512))
    assert np.abs(long_T - short_T).mean() < 0.15
    assert long == pytest.approx(short, rel=0.1)


def test_experts_without_padding_are_refused(model):
    with pytest.raises(RankError, match="divisible by 8"):
        run_ranks(jobs.train_without_expert_padding, 1, fp8_settings(model, recipe="blockwise"), random_batch())


@pytest.mark.parametrize(
    "recompute",
    [FullRecompute(), *(SelectiveRecompute(modules=(module,)) for module in ("layernorm", "moe_act"))],
    ids=["full", "layernorm", "moe_act"],
)
def test_recomputation_under_fp8_changes_nothing(recompute, model, trained):
    result = run_ranks(train, 1, fp8_settings(model, recipe="blockwise", recompute=recompute), random_batch(), 2, 1)
    plain = trained("blockwise")
    np.testing.assert_array_equal(result.after_T, plain.after_T)
    assert [step.grad_norm for step in result.steps] == [step.grad_norm for step in plain.steps]


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_a_checkpoint_continues_as_if_nothing_had_happened(recipe, model, tmp_path):
    """With delayed scaling the scales are part of it."""
    settings = fp8_settings(model, LAYOUTS["tp2-ep2"], recipe=recipe, format="hybrid")
    straight, again = run_ranks(jobs.saved_and_continued, 2, settings, random_batch(), tmp_path)
    assert straight == again
