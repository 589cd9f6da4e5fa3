"""x W^T whose three products (forward, gradient of x, gradient of W) multiply FP8 operands, as Transformer Engine's linear layers do.

Each product takes its operands in the form whose blocks lie along the summed dimension, cast from the original, never cast twice.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.recipe import Float8BlockScaling, Format, Recipe
from transformer_engine.pytorch.quantize import Quantized, Quantizer, exponent_scale, float_scale, power_of_two_scale


@dataclass(frozen=True, slots=True)
class Quantizers:
    """Of the three operands of a layer."""

    input: Quantizer
    weight: Quantizer
    grad: Quantizer
    multiple: int
    """What every dimension must be divisible by; 0: Transformer Engine's general rule, 8 rows and 16 columns."""


def types(recipe: Recipe) -> tuple[torch.dtype, torch.dtype]:
    """Of the forward and of the backward pass."""
    return torch.float8_e4m3fn, torch.float8_e5m2 if recipe.fp8_format == Format.HYBRID else torch.float8_e4m3fn  # type: ignore[attr-defined]


def quantizers(recipe: Recipe) -> Quantizers:
    """For every recipe but delayed scaling, whose scales belong to a module."""
    forward, backward = types(recipe)
    if recipe.mxfp8():
        return Quantizers(*(Quantizer(dtype, (1, 32), exponent_scale) for dtype in (forward, forward, backward)), multiple=32)
    if isinstance(recipe, Float8BlockScaling):
        scale = float_scale if recipe.use_f32_scales else power_of_two_scale
        vector, square = (1, 128), (128, 128)
        of_input, of_weight, of_grad = ((forward, vector), (forward, square), (backward, vector))
        return Quantizers(*(Quantizer(dtype, block, scale) for dtype, block in (of_input, of_weight, of_grad)), multiple=0)
    return Quantizers(*(Quantizer(dtype, None, float_scale) for dtype in (forward, forward, backward)), multiple=0)


def quantized_linear(x: Tensor, weight: Tensor, chosen: Quantizers) -> Tensor:
    """x [..., in], weight [out, in] -> [..., out] in x's dtype. AssertionError for sizes FP8 products cannot have."""
    for operand in (x, weight):
        check_dimensions(operand, chosen.multiple)
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        y = _QuantizedLinear.apply(rows, weight, chosen)
    else:
        y = multiply(chosen.input.rows(rows), chosen.weight.rows(weight)).to(x.dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def check_dimensions(operand: Tensor, multiple: int) -> None:
    """Transformer Engine's rules and words: pytorch/utils.py, assert_dim_for_fp8_exec; pytorch/tensor/mxfp8_tensor.py, make_empty."""
    rows, columns = math.prod(operand.shape[:-1]), operand.shape[-1]
    if multiple and (rows % multiple or columns % multiple):
        raise AssertionError(f"Incorrect shape {tuple(operand.shape)} for MXFP8. Tensor dims must be divisible by {multiple}")
    if rows % 8 or columns % 16:
        raise AssertionError(
            "FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the last dimension to be "
            f"divisible by 16, but got tensor with dims={list(operand.shape)}"
        )


def multiply(left: Quantized, right: Quantized) -> Tensor:
    """left right^T in float32, of two FP8 operands."""
    return left.dequantize() @ right.dequantize().T


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chosen: Quantizers) -> Tensor:  # type: ignore[override]
        ctx.grad, ctx.multiple, ctx.dtypes = chosen.grad, chosen.multiple, (x.dtype, weight.dtype)
        # Now, not in the backward pass: x may be discarded and delayed scales may change in between.
        kept = [chosen.input.columns(x), chosen.weight.columns(weight)]
        ctx.blocks = [operand.block for operand in kept]
        ctx.save_for_backward(*(tensor for operand in kept for tensor in (operand.data, operand.scale_inverse)))
        return multiply(chosen.input.rows(x), chosen.weight.rows(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        check_dimensions(grad, ctx.multiple)
        x, weight = (Quantized(*ctx.saved_tensors[2 * i : 2 * i + 2], ctx.blocks[i]) for i in (0, 1))
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (ctx.grad.rows(grad).dequantize() @ weight.dequantize()).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            grad_weight = (ctx.grad.columns(grad).dequantize().T @ x.dequantize()).to(ctx.dtypes[1])
        return grad_x, grad_weight, None
