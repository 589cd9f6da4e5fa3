"""FP8 in blocks: a worked block, scales of both kinds, ragged edges, and nothing lost on the second round."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.models import fp8_blocks, fp8_names
from moerl.models.fp8_names import is_quantized_when_published

E4M3 = torch.float8_e4m3fn


def quantize(weight, scale_format="float32"):
    values, scales = fp8_blocks.quantized(weight, scale_format)
    assert (values.dtype, scales.dtype) == (E4M3, torch.float32)
    assert (tuple(values.shape), tuple(scales.shape)) == (tuple(weight.shape), fp8_names.scale_shape(tuple(weight.shape)))
    return values, scales


def dequantize(values, scales, dtype=torch.float32):
    return torch.cat(list(fp8_blocks.dequantized(values, scales, dtype)))


def plainly(values, scales):
    """Element by element: w = q * scale of its block."""
    rows, columns = values.shape
    return torch.tensor([[float(values[i, j]) * float(scales[i // 128, j // 128]) for j in range(columns)] for i in range(rows)])


def test_a_worked_block():
    weight = torch.zeros(130, 129)
    weight[0, 0], weight[0, 1], weight[129, 128] = 448.0, 3.0, 0.5
    values, scales = quantize(weight)
    assert scales.equal(torch.tensor([[1.0, 1.0], [1.0, 0.5 / 448]]))
    assert [float(values[0, 0]), float(values[0, 1]), float(values[129, 128])] == [448.0, 3.0, 448.0]


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (300, 129), (127, 256), (257, 5)])
def test_dequantizing_is_the_product_with_the_scale_of_the_block(shape):
    torch.manual_seed(0)
    values, scales = quantize(torch.randn(shape))
    scales = scales * torch.rand(scales.shape)
    assert dequantize(values, scales).equal(plainly(values, scales))


def test_each_of_the_256_values_is_widened_exactly():
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).reshape(2, 128)
    for scale in (1.0, 3.3, 2.0**-126, 2.0**110):
        found = dequantize(values, torch.tensor([[scale]]))
        product = values.to(torch.float32) * scale
        assert found[:, :127].equal(product[:, :127])
        assert found[:, 127].isnan().all()  # and no other value, or the numbers would not be equal
        without_nan = values[:, :127].contiguous()
        assert dequantize(without_nan, torch.tensor([[scale]])).equal(product[:, :127])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.floats(1e-20, 1e20), st.sampled_from(["float32", "ue8m0"]), st.integers(0, 99))
def test_a_second_round_through_bfloat16_changes_nothing(rows, columns, size, scale_format, seed):
    weight = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size).bfloat16()
    values, scales = quantize(weight, scale_format)
    plain = dequantize(values, scales, torch.bfloat16)
    again, scales_again = quantize(plain, scale_format)
    assert dequantize(again, scales_again, torch.bfloat16).equal(plain)
    if scale_format == "float32":
        assert (again.view(torch.uint8).equal(values.view(torch.uint8)), scales_again.equal(scales)) == (True, True)


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_the_error_is_that_of_four_significant_bits(scale_format):
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    found = dequantize(*quantize(weight, scale_format))
    relative = float((found - weight).norm() / weight.norm())
    assert 0.02 < relative < 0.03  # about 2.65 %


def test_ue8m0_scales_are_powers_of_two_rounded_up():
    scales = torch.tensor([1.0, 1.0000001, 3.0, 4.0, 0.75, 2.0**-126])
    assert fp8_blocks.round_up_to_power_of_two(scales).tolist() == [1.0, 2.0, 4.0, 4.0, 1.0, 2.0**-126]
    _, found = quantize(torch.randn(200, 200), "ue8m0")
    assert all(math.log2(float(scale)).is_integer() for scale in found.flatten())


def test_a_block_of_zeros_stays_zero():
    values, scales = quantize(torch.zeros(128, 128))
    assert dequantize(values, scales).equal(torch.zeros(128, 128))
    assert scales.tolist() == [[1.0]]


def test_nothing_overflows_at_the_ends_of_the_range():
    for size in (torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).tiny):
        weight = torch.full((2, 2), size, dtype=torch.bfloat16)
        found = dequantize(*quantize(weight))
        assert found.isfinite().all()
        assert float(found.max()) == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize(
    ("name", "is_quantized"),
    [
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", True),
        ("model.layers.3.mlp.experts.7.down_proj.weight", True),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", True),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.61.eh_proj.weight", False),
        ("model.layers.61.shared_head.head.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_the_published_tensors_are_quantized(name, is_quantized):
    assert is_quantized_when_published(name, (256, 256)) == is_quantized
