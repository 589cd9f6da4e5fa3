"""Attention for padded (sbhd) and packed (thd) sequences, causal or full, with grouped queries."""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class DotProductAttention(nn.Module):
    def __init__(self, num_attention_heads: int, kv_channels: Any, num_gqa_groups: int | None = None, attention_dropout: float = 0.0,
                 attn_mask_type: str = "causal", softmax_scale: float | None = None, cp_group: Any = None, window_size: Any = None,
                 **_: Any) -> None:  # fmt: skip
        super().__init__()
        if cp_group is not None:
            raise RuntimeError("context parallelism is not in the reference transformer_engine; use cp=1")
        if window_size is not None:
            raise RuntimeError("sliding-window attention is not in the reference transformer_engine")
        self.softmax_scale, self.attention_dropout = softmax_scale, attention_dropout

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
        """q [b, heads, s, d], k and v [b, groups, s, d] -> [b, heads, s, d_v]."""
        dropout = self.attention_dropout if self.training else 0.0
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None,
                                                       scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1])  # fmt: skip

    def _attend_packed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], causal: bool) -> torch.Tensor:
        """q [t, heads, d]: sequences of one length go through attention together, which keeps short ones cheap."""
        starts_of: dict[int, list[int]] = {}
        for start, end in pairwise(bounds):
            starts_of.setdefault(end - start, []).append(start)
        pieces, rows = [], []
        for length, starts in starts_of.items():
            index = (torch.tensor(starts)[:, None] + torch.arange(length)[None]).to(q.device)
            out = self._attend(*(t[index].transpose(1, 2) for t in (q, k, v)), None, causal)
            pieces.append(out.transpose(1, 2).reshape(index.numel(), -1))
            rows.append(index.reshape(-1))
        order = torch.argsort(torch.cat(rows))
        return torch.cat(pieces)[order]

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None,
                qkv_format: str = "sbhd", attn_mask_type: str = "causal", cu_seqlens_q: torch.Tensor | None = None,
                core_attention_bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:  # fmt: skip
        if core_attention_bias is not None:
            raise RuntimeError("attention bias is not in the reference transformer_engine")
        causal = "causal" in attn_mask_type
        if qkv_format == "thd":
            assert cu_seqlens_q is not None
            return self._attend_packed(query, key, value, cu_seqlens_q.tolist(), causal)
        mask = ~attention_mask if attention_mask is not None and attn_mask_type in ("padding", "arbitrary", "padding_causal") else None
        out = self._attend(*(t.permute(1, 2, 0, 3) for t in (query, key, value)), mask, causal)
        return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)
