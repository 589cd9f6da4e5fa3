"""Norms of queries and keys over all heads of a layer at once (MiniMax-M2); those of Megatron and Transformer Engine are of single heads.

A weight is whole on every tensor-parallel rank, which uses the part of its heads: Megatron adds up what the ranks found of the gradients
of weights with these names (distributed/finalize_model_grads.py). What is summed over ranks in a pass is one number a token.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from moerl.train.loss.batch_loss import at_least_float32


class NormOverHeads(nn.Module):
    """Root-mean-square norm of [T, 1, heads / tp, channels], over heads and channels of all ranks."""

    def __init__(self, config: TransformerConfig, heads: int, channels: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads * channels, dtype=config.params_dtype, device=torch.cuda.current_device()))
        self.eps, self.group = eps, parallel_state.get_tensor_model_parallel_group()

    def forward(self, x: Tensor) -> Tensor:
        mine = self.weight.chunk(self.group.size())[self.group.rank()]
        return _Norm.apply(x.flatten(-2), mine, self.weight.numel(), self.eps, self.group).view_as(x)


class QueryNorm(NormOverHeads):
    def __init__(self, *, hidden_size: int, config: TransformerConfig, eps: float):
        """`hidden_size`: as Megatron gives it, the channels of a head."""
        super().__init__(config, config.num_attention_heads, hidden_size, eps)


class KeyNorm(NormOverHeads):
    def __init__(self, *, hidden_size: int, config: TransformerConfig, eps: float):
        super().__init__(config, config.num_query_groups, hidden_size, eps)


def norm_over_heads(layers: TransformerBlockSubmodules) -> None:
    """Make the norms of queries and keys of these layers those of this module."""
    for spec in layers.layer_specs:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm


class _Norm(torch.autograd.Function):
    """Keeps its input and a number a token, as Transformer Engine's norms do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, width: int, eps: float, group: dist.ProcessGroup) -> Tensor:
        """[..., n] of `width` in all ranks of the group, and its part [n] of the weight -> [..., n]."""
        wide = at_least_float32(x)
        scale = torch.rsqrt(_sum(wide.square(), group) / width + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.width, ctx.group = width, group
        return (wide * scale * at_least_float32(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed, wide = at_least_float32(x) * scale, at_least_float32(grad)
        of_normed = wide * at_least_float32(weight)
        of_x = scale * (of_normed - normed * (_sum(of_normed * normed, ctx.group) / ctx.width))
        return of_x.to(x.dtype), (wide * normed).flatten(0, -2).sum(0).to(weight.dtype), None, None, None


def _sum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Over the last axis [..., 1] and the ranks of the group."""
    total = values.sum(-1, keepdim=True)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total
