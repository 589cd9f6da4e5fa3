"""Emulated FP8: every value is one that FP8 with the block's scale can hold, and every operand of every product is rounded."""

import numpy as np
import pytest
import torch
from engine_ranks import run_ranks
from fp8_jobs import pad_and_unpad, products, refusals, round_all

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def rounded(x, block, name, power_of_two):
    """The recipe as loops over blocks."""
    out = np.empty_like(x, dtype=np.float32)
    for i in range(0, x.shape[0], block[0]):
        for j in range(0, x.shape[1], block[1]):
            part = x[i : i + block[0], j : j + block[1]].astype(np.float32)
            largest = np.abs(part).max()
            scale = np.float32(1.0 if largest == 0 else np.float32(LARGEST[name]) / largest)
            if power_of_two:
                scale = np.float32(2.0 ** np.floor(np.log2(np.float64(scale))))
            scaled = np.clip(part * scale, -LARGEST[name], LARGEST[name])
            out[i : i + block[0], j : j + block[1]] = torch.from_numpy(scaled).to(TYPES[name]).float().numpy() / scale
    return out


def random(rng, shape):
    """Values over many powers of two, a block of zeros among them."""
    x = (rng.normal(size=shape) * np.exp(rng.normal(size=shape) * 3)).astype(np.float32)
    x[: shape[0] // 3, : shape[1] // 3] = 0
    return x


def test_rounding_equals_the_recipe_stated_block_by_block_with_ragged_edges():
    rng = np.random.default_rng(0)
    blocks, shapes = [(1, 128), (128, 1), (128, 128), (1, 32), (32, 1)], [(5, 300), (200, 130), (1, 1), (33, 64)]
    cases = [(random(rng, s), b, name, power) for s in shapes for b in blocks for name in TYPES for power in (False, True)]
    for case, result in zip(cases, run_ranks(round_all, 1, cases), strict=True):
        # Dividing by a scale that is a power of two is exact.
        np.testing.assert_allclose(result, rounded(*case), rtol=0 if case[3] else 3e-7, atol=0, err_msg=f"{case[0].shape} {case[1:]}")


def test_rounding_keeps_zeros_and_the_scale_of_each_block_and_what_is_not_finite():
    x = np.array([[0.0, 0.0, 1e-6, 2e-6, 1e6, 3e6, np.inf, np.nan]], dtype=np.float32)
    [result] = run_ranks(round_all, 1, [(x, (1, 2), "e4m3", True)])
    assert (result[0, :2] == 0).all()
    np.testing.assert_allclose(result[0, 2:6], x[0, 2:6], rtol=2**-4)
    assert np.isinf(result[0, 6])
    assert np.isnan(result[0, 7])


def test_the_error_of_a_value_is_at_most_half_a_step_of_its_type_while_it_is_no_smaller_than_the_range():
    """e4m3 has 3 bits behind the point: 2 ** -4 of the value, as long as it is above the block's largest / 2 ** 14."""
    rng = np.random.default_rng(1)
    x = rng.uniform(0.01, 1, size=(64, 256)).astype(np.float32)
    [result] = run_ranks(round_all, 1, [(x, (1, 128), "e4m3", False)])
    assert (np.abs(result - x) <= 2.0**-4 * x).all()
    assert np.abs(result - x).max() > 0


@pytest.mark.parametrize(
    ("recipe", "of_x", "of_weight", "of_grad", "power"),
    [
        ("Float8BlockScaling", ((1, 128), (128, 1)), ((128, 128), (128, 128)), ((1, 128), (128, 1)), True),
        ("MXFP8BlockScaling", ((1, 32), (32, 1)), ((1, 32), (32, 1)), ((1, 32), (32, 1)), True),
        ("Float8CurrentScaling", ((64, 160), (64, 160)), ((96, 160), (96, 160)), ((64, 96), (64, 96)), False),
    ],
)
def test_forward_and_backward_products_take_rounded_operands(recipe, of_x, of_weight, of_grad, power):
    """First block: the product that sums over columns; second: the one that sums over rows."""
    rng = np.random.default_rng(2)
    x, weight, grad = random(rng, (64, 160)), random(rng, (96, 160)), random(rng, (64, 96))
    result = run_ranks(products, 1, recipe, x, weight, grad)
    out = rounded(x, of_x[0], "e4m3", power) @ rounded(weight, of_weight[0], "e4m3", power).T
    grad_x = rounded(grad, of_grad[0], "e5m2", power) @ rounded(weight, of_weight[1], "e4m3", power)
    grad_weight = rounded(grad, of_grad[1], "e5m2", power).T @ rounded(x, of_x[1], "e4m3", power)
    for name, expected, plain in (("out", out, x @ weight.T), ("x", grad_x, grad @ weight), ("weight", grad_weight, grad.T @ x)):
        size = np.abs(expected).max()
        np.testing.assert_allclose(result[name], expected, atol=1e-6 * size, rtol=0, err_msg=name)
        assert np.abs(result[name] - plain).max() > 1e-3 * size, f"{name} is not rounded at all"


@pytest.mark.parametrize(
    ("splits", "align", "padded"), [([3, 0, 16, 17], None, [16, 0, 16, 32]), ([1, 32], 32, [32, 32]), ([16], 16, [16])]
)
def test_the_rows_of_an_expert_are_padded_and_come_back(splits, align, padded):
    sizes, rows, back = run_ranks(pad_and_unpad, 1, splits, align)
    assert sizes == padded
    assert len(rows) == sum(padded)
    np.testing.assert_array_equal(back, np.arange(1.0, sum(splits) * 3 + 1, dtype=np.float32).reshape(-1, 3))
    assert rows.sum() == back.sum()


def test_what_the_reference_lacks_is_an_error():
    uneven, delayed, parameters = run_ranks(refusals, 1)
    assert "multiples of 16, got an input (16, 24)" in uneven
    assert "delayed is not in the reference" in delayed
    assert "FP8 parameters are not" in parameters
