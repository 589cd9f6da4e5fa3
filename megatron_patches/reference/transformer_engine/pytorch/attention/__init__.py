"""Attention for padded (sbhd) and packed (thd) sequences, causal or full, within a window or not, with or without learned sinks.

Queries may be grouped, packed sequences cut over context-parallel ranks.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


class DotProductAttention(nn.Module):
    def __init__(self, num_attention_heads: int, kv_channels: Any, num_gqa_groups: int | None = None, attention_dropout: float = 0.0,
                 attn_mask_type: str = "causal", softmax_scale: float | None = None, cp_group: Any = None,
                 window_size: tuple[int, int] | None = None, softmax_type: str = "vanilla", tp_size: int = 1,
                 **_: Any) -> None:  # fmt: skip
        super().__init__()
        if softmax_type not in ("vanilla", "learnable"):
            raise RuntimeError(f"softmax_type={softmax_type!r} is not in the reference transformer_engine")
        if window_size is not None and window_size[1] != 0:
            raise RuntimeError(f"window_size={window_size} with keys after the query is not in the reference transformer_engine")
        self.softmax_scale, self.attention_dropout, self.cp_group = softmax_scale, attention_dropout, cp_group
        self.window_size = window_size
        self.softmax_offset = nn.Parameter(torch.zeros(num_attention_heads // tp_size)) if softmax_type == "learnable" else None
        """The logit of a sink that every query sees and that has no value, by head of this rank."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None,
                qkv_format: str = "sbhd", attn_mask_type: str = "causal", cu_seqlens_q: torch.Tensor | None = None,
                core_attention_bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:  # fmt: skip
        if core_attention_bias is not None:
            raise RuntimeError("attention bias is not in the reference transformer_engine")
        causal = "causal" in attn_mask_type
        if self.window_size is not None and (not causal or attention_mask is not None):
            raise RuntimeError("a window without causality, or beside a mask, is not in the reference transformer_engine")
        if qkv_format == "thd":
            assert cu_seqlens_q is not None
            bounds = cu_seqlens_q.tolist()
            if self._is_context_parallel():
                return self._attend_over_ranks(query, key, value, bounds, causal)
            return self._attend_packed(query, key, value, bounds, causal)
        if self._is_context_parallel():
            raise RuntimeError("context parallelism of unpacked sequences is not in the reference transformer_engine")
        mask = ~attention_mask if attention_mask is not None and attn_mask_type in ("padding", "arbitrary", "padding_causal") else None
        out = self._attend(*(t.permute(1, 2, 0, 3) for t in (query, key, value)), mask, causal)
        return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)

    def _is_context_parallel(self) -> bool:
        return self.cp_group is not None and self.cp_group.size() > 1

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
        """q [b, heads, s, d], k and v [b, groups, s, d] -> [b, heads, s, d_v]. `mask`: True where a query sees a key."""
        dropout = self.attention_dropout if self.training else 0.0
        if mask is None and causal and (self.window_size is not None or self.softmax_offset is not None):
            positions = torch.arange(q.shape[2], device=q.device)
            mask = self._sees(positions, positions)
        if self.softmax_offset is not None:
            return self._attend_with_sinks(q, k, v, mask, dropout)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None,
                                                       scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1])  # fmt: skip

    def _sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Causally, by positions in a sequence: bool [queries, keys]. A window is (positions before the query, 0); -1: all of them."""
        distance = queries[:, None] - keys[None]
        before = -1 if self.window_size is None else self.window_size[0]
        return (distance >= 0) if before < 0 else (distance >= 0) & (distance <= before)

    def _attend_with_sinks(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: float
    ) -> torch.Tensor:
        assert self.softmax_offset is not None
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        scale = q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        scores = (q @ k.transpose(2, 3) * scale).float() if q.dtype == torch.bfloat16 else q @ k.transpose(2, 3) * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        sinks = self.softmax_offset.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        return functional.dropout(weights, dropout).to(v.dtype) @ v

    def _attend_packed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], causal: bool) -> torch.Tensor:
        """q [t, heads, d]: sequences of one length go through attention together, which keeps short ones cheap."""
        starts_of: dict[int, list[int]] = {}
        for start, end in pairwise(bounds):
            starts_of.setdefault(end - start, []).append(start)
        if len(starts_of) == 1:  # they follow each other: nothing is to be brought together
            (length,) = starts_of
            # What is kept is no more than this: a value may be part of the projection of all three.
            out = self._attend(*(t.contiguous().unflatten(0, (-1, length)).transpose(1, 2) for t in (q, k, v)), None, causal)
            return out.transpose(1, 2).flatten(0, 1).flatten(1)
        rows = torch.cat([(torch.tensor(s)[:, None] + torch.arange(length)).view(-1) for length, s in starts_of.items()]).to(q.device)
        places = torch.argsort(rows)
        sizes = [length * len(starts) for length, starts in starts_of.items()]
        pieces = []
        for length, parts in zip(
            starts_of, zip(*(_Permuted.apply(t, rows, places).split(sizes) for t in (q, k, v)), strict=True), strict=True
        ):
            out = self._attend(*(part.unflatten(0, (-1, length)).transpose(1, 2) for part in parts), None, causal)
            pieces.append(out.transpose(1, 2).flatten(0, 1).flatten(1))
        return _Permuted.apply(torch.cat(pieces), places, rows)

    def _attend_over_ranks(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], causal: bool) -> torch.Tensor:
        """q, k, v [t / cp, heads, d] of this rank: its queries, sequence by sequence, against the keys of every rank."""
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        # Gathered rank after rank; `place` puts each token where it stands in the whole.
        places = [zigzag(bounds, part, ranks) for part in range(ranks)]
        order = torch.argsort(torch.cat(places)).to(q.device)
        k, v = (_GatherRanks.apply(t, self.cp_group)[order] for t in (k, v))
        pieces, done = [], 0
        for start, end in pairwise(bounds):
            mine = slice(done, done := done + (end - start) // ranks)
            mask = self._sees(places[rank][mine], torch.arange(start, end)).to(q.device) if causal else None
            parts = (t.transpose(0, 1)[None] for t in (q[mine], k[start:end], v[start:end]))
            out = self._attend(*parts, mask, causal=False)
            pieces.append(out[0].transpose(0, 1).reshape(out.shape[2], -1))
        return torch.cat(pieces)


def zigzag(bounds: list[int], rank: int, ranks: int) -> torch.Tensor:
    """Places in the whole of one rank's tokens: chunk `rank` of each sequence and the one as far from its end, of 2 * ranks chunks."""
    pieces = []
    for start, end in pairwise(bounds):
        size = (end - start) // (2 * ranks)
        if size * 2 * ranks != end - start:
            raise RuntimeError(f"a sequence of {end - start} tokens cannot be cut into {2 * ranks} chunks; pad it to a multiple")
        pieces += [torch.arange(start + chunk * size, start + (chunk + 1) * size) for chunk in (rank, 2 * ranks - 1 - rank)]
    return torch.cat(pieces)


class _Permuted(torch.autograd.Function):
    """x[rows], of a permutation and its inverse: the gradient is gathered too, where that of an index is added up row by row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(inverse)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _GatherRanks(torch.autograd.Function):
    """[t, ...] of each rank -> [ranks * t, ...]; backward sums every rank's gradient of the own part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.group, ctx.length = group, x.shape[0]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        summed = grad.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed[ctx.group.rank() * ctx.length :][: ctx.length], None
