"""FP8 in the linear layers of the reference Transformer Engine: every operand of every product is cast, as stated in numpy."""

import re

import fp8_jobs
import fp8_numpy
import numpy as np
import pytest
from engine_ranks import RankError, run_ranks

RECIPES = sorted(fp8_numpy.RULES)


def random_matrices(*shapes):
    """Heavy-tailed, so that blocks differ in scale; within 32 columns ever smaller, so that a block along the wrong side loses some.

    Not the last one, the gradients.
    """
    rng = np.random.default_rng(0)
    fading = [np.float32(2.0) ** -(np.arange(shape[-1], dtype=np.float32) % 32) for shape in shapes[:-1]]
    return [(rng.standard_t(3, size=shape) * factor).astype(np.float32) for shape, factor in zip(shapes, [*fading, 1], strict=True)]


def assert_close(value, wanted, message=""):
    """Column by column."""
    scale = np.abs(wanted).max(axis=0, initial=1e-30)
    np.testing.assert_allclose(value / scale, wanted / scale, err_msg=message, rtol=1e-4, atol=1e-4)


MATRICES = random_matrices((160, 192), (256, 192), (160, 256))
EXPERT_SIZES = (5, 0, 40, 19)
EXPERTS = random_matrices((64, 128), (4, 160, 128), (64, 160))


@pytest.fixture(scope="module")
def products():
    """By recipe and format."""
    return run_ranks(fp8_jobs.linears, 1, *MATRICES, [(recipe, kind) for recipe in RECIPES for kind in ("e4m3", "hybrid")])


@pytest.fixture(scope="module")
def expert_products():
    return run_ranks(fp8_jobs.groups, 1, *EXPERTS, EXPERT_SIZES, RECIPES)


@pytest.mark.parametrize("kind", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_products_of_both_passes_are_those_of_cast_operands(recipe, kind, products):
    (x, weight, grad), got = MATRICES, products[recipe, kind]
    wanted = fp8_numpy.linear(x, weight, grad, recipe, "e5m2" if kind == "hybrid" else "e4m3")
    exact = x @ weight.T, grad @ weight, grad.T @ x
    for name, product, plain in zip(("y", "x", "weight"), wanted, exact, strict=True):
        # Sums in float32 against float64; a cast that is left out differs by some percent.
        assert_close(got[name], product, name)
        # Had one operand not been cast, the statement, which casts both, would not hold; and both leave a mark.
        assert np.abs(got[name] - plain).mean() > 1e-2 * np.abs(plain).mean(), name


@pytest.mark.parametrize("left_out", ["y", "x", "weight"])
def test_the_statement_notices_an_operand_that_is_not_cast(left_out, monkeypatch):
    """Of each product, either operand: the tolerance above is far below what one cast changes."""
    x, weight, grad = MATRICES
    names = ("y", "x", "weight")
    whole = dict(zip(names, fp8_numpy.linear(x, weight, grad, "blockwise", "e4m3"), strict=True))
    cast = fp8_numpy.quantize
    for kept in {"y": (x, weight), "x": (grad, weight), "weight": (grad, x)}[left_out]:
        monkeypatch.setattr(fp8_numpy, "quantize", lambda m, *rest, kept=kept: (m, m) if m is kept else cast(m, *rest))
        product = dict(zip(names, fp8_numpy.linear(x, weight, grad, "blockwise", "e4m3"), strict=True))[left_out]
        assert np.abs(product - whole[left_out]).max() > 1e-2 * np.abs(whole[left_out]).max() > 0


def test_a_layer_with_a_norm_casts_what_the_norm_gives():
    x, weight, grad = random_matrices((32, 128), (64, 128), (32, 64))
    got = run_ranks(fp8_jobs.linear, 1, x, weight, grad, "blockwise", "e4m3", True)
    y, _, of_weight = fp8_numpy.linear(got["normed"], weight, grad, "blockwise", "e4m3")
    assert_close(got["y"], y)
    assert_close(got["weight"], of_weight)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_expert_is_cast_alone_and_padding_changes_nothing(recipe, expert_products):
    """Token counts that no recipe likes, none among them; the padded rows are zeros, which no scale notices."""
    (x, weights, grad), sizes, got = EXPERTS, EXPERT_SIZES, expert_products[recipe]
    multiple = 32 if recipe == "mxfp8" else 16
    assert got["sizes"].tolist() == [-(-size // multiple) * multiple for size in sizes]
    done = 0
    for index, size in enumerate(sizes):
        mine = slice(done, done := done + size)
        y, of_x, of_weight = fp8_numpy.linear(x[mine], weights[index], grad[mine], recipe, "e4m3")
        for value, wanted in ((got["y"][mine], y), (got["x"][mine], of_x), (got["weights"][index], of_weight)):
            assert_close(value, wanted)


def test_sizes_that_fp8_products_cannot_have_are_refused_in_transformer_engines_words():
    """The last two only in the backward pass, which sums over the output side."""
    general = "divisible by 8 and the last dimension to be divisible by 16, but got tensor with dims="
    cases = {
        (12, 32, 32, "blockwise"): f"{general}[12, 32]",
        (16, 40, 32, "tensorwise"): f"{general}[16, 40]",
        (16, 32, 20, "delayed"): f"{general}[20, 32]",
        (48, 32, 32, "mxfp8"): "Incorrect shape (48, 32) for MXFP8. Tensor dims must be divisible by 32",
        (16, 32, 24, "blockwise"): f"{general}[16, 24]",
        (16, 32, 24, "delayed"): f"{general}[16, 24]",
    }
    for message, wanted in zip(run_ranks(fp8_jobs.errors_of, 1, fp8_jobs.run_shape, list(cases)), cases.values(), strict=True):
        assert wanted in message


def test_fp8_is_on_inside_an_autocast_only():
    states = run_ranks(fp8_jobs.fp8_off_outside, 1)
    assert states == {"before": True, "inside": False, "switched_off": True, "again": False, "after": True}


@pytest.mark.parametrize(("algorithm", "length"), [("most_recent", 1), ("max", 2)])
def test_delayed_scales_come_from_earlier_passes(algorithm, length):
    """Pass n has inputs of up to n and gradients of up to 1 / (4 n)."""
    x = np.linspace(-1, 1, 16 * 32, dtype=np.float32).reshape(16, 32)
    passes = run_ranks(fp8_jobs.delayed_passes, 1, x, 3, algorithm, length)
    gradients = (0.25, 0.125, 0.25 / 3) if algorithm == "most_recent" else (0.25, 0.25, 0.125)
    for number, (of_input, of_weight, of_grad, _) in enumerate(passes):
        assert of_input == pytest.approx(448 / (number + 1), rel=1e-6)
        assert of_weight == pytest.approx(448 / 0.5, rel=1e-6)
        assert of_grad == pytest.approx(57344 / gradients[number], rel=1e-6)
    # The first pass has scale 1; the second uses the first one's, with which twice its values do not fit.
    rows = fp8_numpy.nearest(x, "e4m3")
    np.testing.assert_allclose(passes[0][3], (rows @ np.full((32, 16), 0.5)), rtol=1e-5, atol=1e-5)
    clipped = fp8_numpy.nearest(2 * x * np.float32(448), "e4m3") / np.float32(448)
    assert np.abs(clipped).max() == 1
    np.testing.assert_allclose(passes[1][3], clipped @ np.full((32, 16), 0.5), rtol=1e-5, atol=1e-5)


def test_delayed_scales_hold_the_largest_value_of_all_ranks():
    assert run_ranks(fp8_jobs.delayed_scales_of_ranks, 2) == [(224.0, 448.0)] * 2


def test_delayed_scales_travel_in_a_modules_state_whole_and_by_expert():
    assert run_ranks(fp8_jobs.delayed_state_round_trip, 1) == (True, True)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "tensorwise"])
def test_recomputation_gives_the_same_bits(recipe):
    plain, again = run_ranks(fp8_jobs.recomputed, 1, recipe)
    for name, value in plain.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_recomputation_under_delayed_scaling_is_refused():
    with pytest.raises(RankError, match="recomputation under delayed scaling"):
        run_ranks(fp8_jobs.recomputed, 1, "delayed")


def test_what_the_reference_lacks_is_an_error():
    """The first three are what Megatron may ask for since the reference calls itself 2.6."""
    cases = [
        ("Linear", "delay_wgrad_compute", True),
        ("LayerNormLinear", "symmetric_ar_type", "one_shot"),
        ("GroupedLinear", "delay_wgrad_compute", True),
        ("DelayedScaling", "fp8_dpa", True),
        ("DelayedScaling", "override_linear_precision", (False, False, True)),
        ("Float8CurrentScaling", "fp8_dpa", True),
        ("model_init", "enabled", True),
    ]
    for message, case in zip(run_ranks(fp8_jobs.errors_of, 1, fp8_jobs.build_with, cases), cases, strict=True):
        assert re.search("Transformer Engine on a GPU|not in the reference", message), case
