"""Casts of matrices to FP8 with one scale per block, as Transformer Engine's kernels make them, and back.

Sources: transformer_engine/common/recipe/recipe_common.cuh (scales), common/transpose/quantize_transpose_*_blockwise.cu (blocks),
common/util/ptx.cuh (exponents of MXFP8).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Block = tuple[int, int] | None
"""Rows and columns that share a scale; None: the whole matrix."""
Scale = Callable[[Tensor, float, float], tuple[Tensor, Tensor]]
"""(largest magnitude per block, largest finite FP8 value, largest finite value of the source's type) -> (scale, its inverse), float32."""


@dataclass(frozen=True, slots=True)
class Quantized:
    data: Tensor
    """FP8 [rows, columns]"""
    scale_inverse: Tensor
    """float32 [blocks of rows, blocks of columns]: what an FP8 value stands for is value * scale_inverse."""
    block: Block

    def dequantize(self) -> Tensor:
        """float32 [rows, columns]"""
        rows, columns = self.data.shape
        if self.block is None or rows == 0:
            return self.data.float() * self.scale_inverse
        wide = self.scale_inverse.repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1)
        return self.data.float() * wide[:rows, :columns]


@dataclass(frozen=True, slots=True)
class Quantizer:
    """How one operand is cast. `rows` is the form whose blocks lie along the columns of a row; `columns` that of its transpose."""

    dtype: torch.dtype
    block: Block
    scale: Scale

    def rows(self, matrix: Tensor) -> Quantized:
        return quantize(matrix, self.dtype, self.block, self.scale)

    def columns(self, matrix: Tensor) -> Quantized:
        return quantize(matrix, self.dtype, None if self.block is None else (self.block[1], self.block[0]), self.scale)


def quantize(matrix: Tensor, dtype: torch.dtype, block: Block, scale_of: Scale) -> Quantized:
    """Nearest FP8 value (ties to even) of matrix * scale; what lies beyond the largest finite one, infinities too, becomes that one.

    NaN stays NaN and does not count for a block's largest magnitude. Blocks at the edges may be smaller.
    """
    rows, columns = matrix.shape
    largest = torch.finfo(dtype).max
    if rows == 0:
        return Quantized(matrix.to(dtype), torch.ones(1, 1, device=matrix.device), None)
    wide = matrix.float()
    height, width = (rows, columns) if block is None else block
    padded = functional.pad(wide, (0, -columns % width, 0, -rows % height))
    tiles = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    amax = tiles.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax((1, 3))
    scale, inverse = scale_of(amax, largest, torch.finfo(matrix.dtype).max)
    scaled = (tiles * scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return Quantized(scaled.clamp(-largest, largest).to(dtype), inverse, block)


def float_scale(amax: Tensor, largest: float, source_max: float) -> tuple[Tensor, Tensor]:
    """largest / amax; 1 for blocks of zeros and with an infinity. A quotient that float32 cannot hold becomes the source's maximum."""
    # Not largest / amax, which PyTorch computes as a reciprocal and a product, rounding twice.
    quotient = torch.full_like(amax, largest) / amax
    scale = torch.where(quotient.isinf(), torch.full_like(amax, source_max), quotient)
    scale = torch.where((amax == 0) | amax.isinf(), torch.ones_like(amax), scale)
    return scale, scale.reciprocal()


def power_of_two_scale(amax: Tensor, largest: float, source_max: float) -> tuple[Tensor, Tensor]:
    """The same, rounded down to a power of two: its mantissa cleared."""
    scale, _ = float_scale(amax, largest, source_max)
    scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale, scale.reciprocal()


def exponent_scale(amax: Tensor, largest: float, source_max: float) -> tuple[Tensor, Tensor]:
    """MXFP8: the inverse is amax / largest rounded up to a power of two, an exponent of 8 bits, at least 2^-127 and at most 2^127."""
    quotient = amax * torch.tensor(1 / largest, dtype=torch.float32, device=amax.device)
    mantissa, exponent = torch.frexp(quotient)
    # frexp's mantissa lies in [0.5, 1): one half is an exact power of two.
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = torch.where(quotient == 0, torch.full_like(exponent, -127), exponent)
    exponent = torch.where(quotient.isinf(), torch.full_like(exponent, 127), exponent).clamp(-127, 127).float()
    return torch.exp2(-exponent), torch.exp2(exponent)
