"""Rotary positions of queries and keys (arXiv:2104.09864), rotated by halves, of padded (sbhd) and packed (thd) sequences.

One turn of all sequences at once, with cosines that the layers of a pass share, where Megatron's own code, which runs without this module,
walks over the sequences in every layer. The arguments are those of Transformer Engine's attention/rope.py.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", start_positions: Any = None, interleaved: bool = False, fused: bool = False,
    cu_seqlens: Tensor | None = None, cp_size: int = 1, cp_rank: int = 0,
) -> Tensor:  # fmt: skip
    """`t`: sbhd [s, b, heads, d], or thd [t / cp, heads, d] with `cu_seqlens` [sequences + 1] of the whole. `freqs`: angles [positions, 1,
    1, d_rotated]; what a head has beyond d_rotated stays as it is. Computed in float32, or in float64 for float64."""
    if interleaved or start_positions is not None or tensor_format not in ("sbhd", "thd"):
        raise RuntimeError(f"rotary positions of {tensor_format}, interleaved or from others than 0, need Transformer Engine on a GPU")
    if tensor_format == "sbhd":
        freqs, cu_seqlens = freqs[: t.shape[0]], None
    return _Rotated.apply(t, (freqs, cu_seqlens, cp_size, cp_rank, torch.promote_types(t.dtype, torch.float32)))


@lru_cache(maxsize=2)  # by the identity of tensors: layers of a pass ask with the same
def _turn(freqs: Tensor, cu_seqlens: Tensor | None, cp_size: int, cp_rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of this rank's tokens: [t / cp, 1, d_rotated], of unpacked ones as `freqs`."""
    angles = freqs if cu_seqlens is None else freqs[_positions(cu_seqlens, cp_size, cp_rank)].flatten(1, -2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _positions(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Of each of this rank's tokens in its sequence; of several ranks' each has chunk `cp_rank` of 2 * cp_size and the one as far from
    the end."""
    starts, lengths = cu_seqlens[:-1].long() // cp_size, cu_seqlens.diff().long() // cp_size
    place = torch.arange(int(cu_seqlens[-1]) // cp_size, device=cu_seqlens.device) - starts.repeat_interleave(lengths)
    if cp_size == 1:
        return place
    half = (lengths // 2).repeat_interleave(lengths)
    return torch.where(place < half, cp_rank * half + place, (2 * cp_size - 2 - cp_rank) * half + place)


class _Rotated(torch.autograd.Function):
    """(x, y) -> (x cos - y sin, y cos + x sin), the halves of each head. It keeps the angles, which all layers share, as Transformer Engine
    does."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, angles: tuple[Any, ...]) -> Tensor:  # type: ignore[override]
        ctx.angles = angles
        return _turned(t, *_turn(*angles), sign=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The same turn, backwards."""
        return _turned(grad, *_turn(*ctx.angles), sign=-1), None


def _turned(t: Tensor, cos: Tensor, sin: Tensor, *, sign: int) -> Tensor:
    rotated = cos.shape[-1]
    wide, out = t.to(cos.dtype), torch.empty(t.shape, dtype=cos.dtype, device=t.device)
    first, second = slice(0, rotated // 2), slice(rotated // 2, rotated)
    for mine, other, direction in ((first, second, -sign), (second, first, sign)):
        # Of the angle whose sine it was multiplied with: backwards that of the other half.
        angle = mine if sign == 1 else other
        part = torch.mul(wide[..., mine], cos[..., mine], out=out[..., mine])
        part.addcmul_(wide[..., other], sin[..., angle], value=direction)
    if rotated < t.shape[-1]:
        out[..., rotated:] = wide[..., rotated:]
    return out.to(t.dtype)
