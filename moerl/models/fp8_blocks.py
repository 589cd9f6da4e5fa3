"""FP8 weights with a scale for every block of 128 x 128, as DeepSeek-V3 publishes them: w = q * weight_scale_inv, despite "inv".

Blocks are those of the whole tensor; the last of a row or column may be smaller. Format: DeepSeek-V3's README_WEIGHTS.md.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from moerl.models.fp8_names import BLOCK, scale_shape

MAX = torch.finfo(torch.float8_e4m3fn).max
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
"""Dtypes in which published checkpoints store scales: DeepSeek-V3's in float32, Qwen3's in bfloat16. float32 has every value of each."""
SCALE_NAMES = "float32, bfloat16, float16 or float8_e8m0fnu"
ScaleFormat = Literal["float32", "ue8m0"]
"""ue8m0: rounded up to a power of two, still stored as float32 (DeepSeek-V3.1)."""

_NAN = 0x7F
"""Without its sign."""
_FLOAT16_PLACES = 0xBF80 - 2**16
"""Sign, the four lower bits of the exponent, the three upper bits of the fraction, as an int16."""


def dequantized(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """`rows` [R, C] that begin at a block, in float8; their `scales` [ceil(R / BLOCK), ceil(C / BLOCK)], float32. In parts, in order."""
    columns = rows.shape[1]
    for index, part in enumerate(rows.split(BLOCK)):
        values, factor = _as_float32(part)
        yield values.mul_((scales[index] * factor).repeat_interleave(BLOCK)[:columns]).to(dtype)


def _as_float32(values: Tensor) -> tuple[Tensor, float]:
    """(float32, factor): float8 values are the product, exactly.

    PyTorch widens float8 one by one on CPUs. Shifted to the places of float16, sign, exponent and fraction are the value times 2**-8,
    because the exponents' biases are 7 and 15: ten times as fast. NaN would become a number.
    """
    bits = values.view(torch.int8)
    if int(bits.bitwise_and(0x7F).amax()) == _NAN:
        return values.to(torch.float32), 1.0
    return bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_FLOAT16_PLACES).view(torch.float16).to(torch.float32), 256.0


def quantized(rows: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
    """(float8 [R, C], its scales float32 [ceil(R / BLOCK), ceil(C / BLOCK)]) of `rows` that begin at a block of the whole tensor."""
    scales = scales_of(block_maxima(rows, (0, 0), tuple(rows.shape)), scale_format)
    return quantized_box(rows, (0, 0), scales), scales


def scales_of(amax: Tensor, scale_format: ScaleFormat) -> Tensor:
    """Scales of blocks whose largest absolute values are `amax`, float32."""
    # By a tensor: by a number, CUDA multiplies with its reciprocal, and the last bit would not be the CPU's.
    scales = amax / torch.full_like(amax, MAX)
    scales = torch.where(amax == 0, torch.ones_like(amax), scales)  # a block of zeros would divide by zero
    # The smallest normal number: below it a scale loses bits, and its reciprocal overflows.
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    return round_up_to_power_of_two(scales) if scale_format == "ue8m0" else scales


def block_maxima(box: Tensor, start: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """Largest absolute values in all blocks of a tensor of `shape`, as far as `box` [R, C] at `start` in it has them; else 0. float32."""
    maxima = torch.zeros(scale_shape(shape), dtype=torch.float32, device=box.device)
    for row, columns, strip in _strips(box, start):
        maxima[row].scatter_reduce_(0, columns, strip.abs().amax(dim=0).float(), "amax")
    return maxima


def quantized_box(box: Tensor, start: Sequence[int], scales: Tensor) -> Tensor:
    """float8 [R, C] of `box` [R, C] at `start` in a tensor, by the `scales` of all its blocks."""
    parts = [(strip.float() / scales[row][columns]).clamp(-MAX, MAX).to(torch.float8_e4m3fn) for row, columns, strip in _strips(box, start)]
    return torch.cat(parts) if parts else box.to(torch.float8_e4m3fn)


def _strips(box: Tensor, start: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(row of blocks, the columns of blocks of every column, what of the box lies in that row of blocks)."""
    first, stop = start[0], start[0] + box.shape[0]
    columns = torch.arange(start[1], start[1] + box.shape[1], device=box.device) // BLOCK
    while first < stop:
        end = min((first // BLOCK + 1) * BLOCK, stop)
        yield first // BLOCK, columns, box[first - start[0] : end - start[0]]
        first = end


def round_up_to_power_of_two(scales: Tensor) -> Tensor:
    """Exactly, from the bits: a logarithm in float32 rounds."""
    mantissa, exponent = torch.frexp(scales)  # scales = mantissa * 2**exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(scales), torch.where(mantissa == 0.5, exponent - 1, exponent))
