"""Gated delta rule (arXiv:2412.06464): a memory S of [key, value] that forgets, and is corrected towards each value under its key.

S_t = a_t S_(t-1) + b_t k_t (v_t - a_t k_t^T S_(t-1)), o_t = q_t^T S_t. Within a chunk the corrections of all positions solve a triangular
system; chunks follow each other.
"""

from collections.abc import Sequence
from typing import Any

import torch

_CHUNK = 64


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float | None = None,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """q, k [B, T, heads, key], v [B, T, heads, value], g (log of a) and beta [B, T, heads] -> [B, T, heads, value]."""
    if initial_state is not None or output_final_state or use_qk_l2norm_in_kernel:
        raise NotImplementedError("states, and norms inside")
    wide = torch.promote_types(q.dtype, torch.float32)
    heads_first = [each.to(wide).movedim(2, 1) for each in (q * (q.shape[-1] ** -0.5 if scale is None else scale), k, v, g, beta)]
    parts = zip(*(sequences(each, cu_seqlens, dim=2) for each in heads_first), strict=True)
    return torch.cat([_sequence(*part) for part in parts], dim=2).movedim(1, 2).to(q.dtype), None


def sequences(x: torch.Tensor, cu_seqlens: torch.Tensor | None, dim: int = 1) -> Sequence[torch.Tensor]:
    """Parts of the axis of positions."""
    return [x] if cu_seqlens is None else x.split(cu_seqlens.diff().tolist(), dim=dim)


def _sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """[B, heads, T, ...] of one sequence."""
    state, outputs = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), []
    for part in zip(*(each.split(_CHUNK, dim=2) for each in (q, k, v, g, beta)), strict=True):
        out, state = _chunk(*part, state)
        outputs.append(out)
    return torch.cat(outputs, dim=2)


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    since = g.cumsum(-1)[..., None]
    """Log of what is left at each position of the state before the chunk."""
    later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    left = (since - since.mT).masked_fill(later, -torch.inf).exp()
    keys = beta[..., None] * k
    system = (keys @ k.mT * left).tril(-1)
    corrections = torch.linalg.solve_triangular(system, beta[..., None] * v - since.exp() * keys @ state, upper=False, unitriangular=True)
    out = since.exp() * q @ state + (q @ k.mT * left) @ corrections
    end = since[..., -1:, :]
    return out, end.exp() * state + (k * (end - since).exp()).mT @ corrections
