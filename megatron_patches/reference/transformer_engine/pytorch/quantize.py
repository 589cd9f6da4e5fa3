"""FP8 emulated: tensors are rounded to what FP8 with scales can hold, and matrix products take the rounded values.

Products accumulate in float32, as the hardware does. What is rounded, by recipe (Transformer Engine, pytorch/tensor/*_tensor.py):
* tensorwise: every operand with one scale.
* blockwise: activations and gradients in 1 x 128 blocks along the dimension that is summed, weights in 128 x 128 blocks.
* mxfp8: every operand in blocks of 32 along the dimension that is summed.
An operand of the backward pass is summed over its other dimension, so that it is rounded again from the original, not transposed.
"""

from typing import Any, Literal

import torch
from torch.nn import functional

from transformer_engine.common.recipe import Float8BlockScaling, MXFP8BlockScaling, Recipe

Kind = Literal["activation", "weight", "gradient"]


def round_to_fp8(x: torch.Tensor, recipe: Recipe, kind: Kind, summed: int) -> torch.Tensor:
    """float32 values of the 2-dimensional `x` after a round trip through FP8; `summed`: the dimension a product sums over."""
    forward, backward = recipe.fp8_format.value  # type: ignore[attr-defined]
    return round_in_blocks(x, _block(x, recipe, kind, summed), backward if kind == "gradient" else forward, recipe.power_of_two)  # type: ignore[attr-defined]


def _block(x: torch.Tensor, recipe: Recipe, kind: Kind, summed: int) -> tuple[int, int]:
    rows, columns = max(x.shape[0], 1), max(x.shape[1], 1)
    if isinstance(recipe, Float8BlockScaling):
        return (128, 128) if kind == "weight" else (1, 128) if summed == 1 else (128, 1)
    if isinstance(recipe, MXFP8BlockScaling):
        return (1, 32) if summed == 1 else (32, 1)
    return rows, columns


def round_in_blocks(x: torch.Tensor, block: tuple[int, int], fp8: Any, power_of_two: bool) -> torch.Tensor:
    """Blocks at the edges may be smaller. A block of zeros has scale 1; one with an infinity or NaN stays what it is there."""
    wide = x.float()
    largest = _block_maxima(wide.abs(), block)
    scale = torch.where((largest > 0) & torch.isfinite(largest), fp8.largest / largest, 1.0)
    # A tiny maximum must not give an infinite scale.
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    if power_of_two:
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
    scale = scale.repeat_interleave(block[0], 0)[: x.shape[0]].repeat_interleave(block[1], 1)[:, : x.shape[1]]
    rounded = (wide * scale).clamp(-fp8.largest, fp8.largest).to(fp8.dtype).float() / scale
    return torch.where(torch.isfinite(wide), rounded, wide)


def _block_maxima(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    padded = functional.pad(x, (0, -x.shape[1] % block[1], 0, -x.shape[0] % block[0]))
    return padded.reshape(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1]).amax((1, 3))


class Fp8Product(torch.autograd.Function):
    """x W^T of x [tokens, in] and W [out, in], with operands in FP8 forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:  # type: ignore[override]
        _require_multiples(x, weight, recipe)
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        product = round_to_fp8(x, recipe, "activation", 1) @ round_to_fp8(weight, recipe, "weight", 1).T
        return product.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:  # type: ignore[override]
        (x, weight), recipe = ctx.saved_tensors, ctx.recipe
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (round_to_fp8(grad, recipe, "gradient", 1) @ round_to_fp8(weight, recipe, "weight", 0)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (round_to_fp8(grad, recipe, "gradient", 0).T @ round_to_fp8(x, recipe, "activation", 0)).to(weight.dtype)
        return grad_x, grad_weight, None


def alignment(recipe: Recipe | None) -> int:
    """What every dimension of an operand must be a multiple of."""
    return 32 if isinstance(recipe, MXFP8BlockScaling) else 16


def _require_multiples(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> None:
    multiple = alignment(recipe)
    if any(size % multiple for size in (*x.shape, *weight.shape)):
        shapes = f"an input {tuple(x.shape)} and a weight {tuple(weight.shape)}"
        raise RuntimeError(f"FP8 needs operands whose dimensions are multiples of {multiple}, got {shapes}")


def product(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe | None) -> torch.Tensor:
    """x [..., in] W^T; plain where `recipe` is None."""
    if recipe is None:
        return functional.linear(x, weight)
    return Fp8Product.apply(x.reshape(-1, x.shape[-1]), weight, recipe).reshape(*x.shape[:-1], weight.shape[0])


class Fp8Padding(torch.nn.Module):
    """Rows of each expert padded with zeros to what FP8 demands of their number."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        padded = padded_splits(m_splits, self.align_size)
        if padded == list(m_splits):
            return inp, padded
        rows = [functional.pad(part, (0, 0, 0, more - len(part))) for part, more in zip(torch.split(inp, m_splits), padded, strict=True)]
        return torch.cat(rows), padded


class Fp8Unpadding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        padded = padded_splits(m_splits, self.align_size)
        return torch.cat([part[:rows] for part, rows in zip(torch.split(inp, padded), m_splits, strict=True)])


def padded_splits(m_splits: list[int], align_size: int | None) -> list[int]:
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    multiple = alignment(FP8GlobalStateManager.recipe) if align_size is None else align_size
    return [-(-rows // multiple) * multiple for rows in m_splits]
