"""Casts to FP8 of the reference Transformer Engine against a statement in numpy, and properties that any block-wise cast has."""

import importlib.util
from pathlib import Path

import fp8_numpy
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import megatron_patches

FILE = Path(megatron_patches.__file__).parent / "reference" / "transformer_engine" / "pytorch" / "quantize.py"
spec = importlib.util.spec_from_file_location("reference_quantize", FILE)
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALES = {"float": reference.float_scale, "power_of_two": reference.power_of_two_scale, "exponent": reference.exponent_scale}
HALF_STEP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
SMALLEST = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}

kinds, rules = st.sampled_from(sorted(TYPES)), st.sampled_from(sorted(SCALES))
blocks = st.sampled_from([None, (1, 4), (4, 1), (2, 3), (1, 128)])
magnitudes = st.floats(min_value=2.0**-60, max_value=2.0**60, width=32)
numbers = st.builds(lambda sign, value: sign * value, st.sampled_from([-1.0, 0.0, 1.0]), magnitudes)
finite = arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 9)), elements=numbers)
anything = arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 9)), elements=st.floats(width=32))


def cast(x, kind, block, rule):
    return reference.quantize(torch.from_numpy(np.array(x, dtype=np.float32)), TYPES[kind], block, SCALES[rule])


def assert_equals_statement(x, kind, block, rule):
    quantized = cast(x, kind, block, rule)
    codes, meant = fp8_numpy.quantize(x, kind, block, rule)
    np.testing.assert_array_equal(quantized.data.float().numpy(), codes)
    np.testing.assert_array_equal(quantized.dequantize().numpy(), meant)


@given(anything, kinds, blocks, rules)
def test_any_matrix_is_cast_as_stated(x, kind, block, rule):
    """Ragged edges, zeros, subnormals, infinities and NaN among them."""
    assert_equals_statement(x, kind, block, rule)


@pytest.mark.parametrize("kind", sorted(TYPES))
@pytest.mark.parametrize("rule", sorted(SCALES))
@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128), (1, 32), (32, 1), None])
def test_the_blocks_of_every_recipe_with_ragged_edges_are_cast_as_stated(kind, rule, block):
    x = np.random.default_rng(0).standard_t(2, size=(150, 200)).astype(np.float32)
    x[3] = 0
    x[7, 5] = np.inf
    assert_equals_statement(x, kind, block, rule)


def test_every_fp8_value_and_the_middle_between_two_is_rounded_as_stated():
    """With scale 1: the first value of each row pins it."""
    for kind, largest in fp8_numpy.LARGEST.items():
        values = fp8_numpy.positive_values(kind)
        points = np.concatenate([values, (values[:-1] + values[1:]) / 2, [largest * 1.01, np.inf]]).astype(np.float32)
        row = np.concatenate([[largest], points[points <= largest], -points[points <= largest]])[None]
        assert_equals_statement(row.astype(np.float32), kind, None, "power_of_two")
        np.testing.assert_array_equal(cast(values[None], kind, None, "power_of_two").data.float().numpy()[0], values)


def test_infinities_become_the_largest_value_and_nan_stays():
    x = np.array([[np.inf, -np.inf, np.nan, 2.0]], dtype=np.float32)
    np.testing.assert_array_equal(cast(x, "e4m3", (1, 4), "power_of_two").dequantize().numpy(), [[448, -448, np.nan, 2]])


def test_an_expert_without_tokens_has_nothing_to_cast():
    assert cast(np.zeros((0, 32)), "e4m3", (1, 32), "exponent").dequantize().shape == (0, 32)


@given(finite, kinds, blocks, rules)
def test_the_error_is_half_a_step_of_the_value_or_of_the_smallest_one(x, kind, block, rule):
    quantized = cast(x, kind, block, rule)
    smallest = reference.Quantized(torch.full(x.shape, SMALLEST[kind]).to(TYPES[kind]), quantized.scale_inverse, quantized.block)
    error = np.abs(quantized.dequantize().numpy().astype(np.float64) - x)
    # A float32 scale and its inverse are each rounded: a little more than half a step.
    assert (error <= 1.000001 * np.maximum(np.abs(x) * HALF_STEP[kind], smallest.dequantize().numpy() / 2)).all()


@given(finite, kinds, blocks, st.sampled_from(["power_of_two", "exponent"]))
def test_casting_again_changes_nothing(x, kind, block, rule):
    once = cast(x, kind, block, rule).dequantize().numpy()
    np.testing.assert_array_equal(cast(once, kind, block, rule).dequantize().numpy(), once)


@given(finite, kinds, blocks, rules)
def test_signs_turn_with_the_matrix(x, kind, block, rule):
    np.testing.assert_array_equal(cast(-x, kind, block, rule).dequantize().numpy(), -cast(x, kind, block, rule).dequantize().numpy())


@given(finite, kinds, blocks, rules, st.integers(-20, 20))
def test_a_power_of_two_passes_through(x, kind, block, rule, exponent):
    factor = np.float32(2.0**exponent)
    scaled = cast(x * factor, kind, block, rule).dequantize().numpy()
    np.testing.assert_array_equal(scaled, cast(x, kind, block, rule).dequantize().numpy() * factor)


@given(finite, kinds, rules, st.integers(0, 5), numbers)
def test_a_row_does_not_depend_on_the_others(x, kind, rule, row, other):
    """Blocks along a row: what padding and neighbours in a micro-batch hold changes nothing."""
    changed = np.full_like(x, other)
    row %= len(x)
    changed[row] = x[row]
    np.testing.assert_array_equal(
        cast(changed, kind, (1, 4), rule).dequantize().numpy()[row], cast(x, kind, (1, 4), rule).dequantize().numpy()[row]
    )


@given(finite, kinds, blocks, rules)
def test_the_columns_of_a_matrix_are_the_rows_of_its_transpose(x, kind, block, rule):
    quantizer = reference.Quantizer(TYPES[kind], block, SCALES[rule])
    columns, rows = quantizer.columns(torch.from_numpy(x)), quantizer.rows(torch.from_numpy(x.T.copy()))
    np.testing.assert_array_equal(columns.dequantize().numpy(), rows.dequantize().numpy().T)
