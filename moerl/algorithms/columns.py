"""Columns of tokens, as objectives and corrections see them: they know their sequences.

A micro-batch of a rank, or a whole batch without any rank. Values outside the mask are 0 everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.algorithms.kl_formulas import EXPONENT_LIMIT
from moerl.types.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns:
    """Columns [T], in the dtype of the log-probs (float32 or float64)."""

    logp_T: Tensor
    """Log-probs under the policy, with gradient."""
    whole_logp_T: Tensor
    """The same where sampling kept the whole vocabulary; else `logp_T` is of what it kept, and this of all."""
    old_logp_T: Tensor
    """Under the old policy; the policy's own, without gradient, if that has not moved."""
    rollout_logp_T: Tensor
    """By the server."""
    advantage_T: Tensor
    mask_T: Tensor
    """bool: the policy produced the token, and it is trained on."""
    reference_logp_T: Tensor | None = None
    values_T: Tensor | None = None
    """A critic's estimates, before it learns, where the step has one."""
    selected_T: Tensor | None = None
    """bool: what the objective's `select` chose of the mini-batch."""
    sequence_T: Tensor
    """int64, number of the token's sequence, from 0 to num_sequences - 1."""
    num_sequences: int
    """In these columns; one of them may stand for padding."""
    tokens_T: Tensor
    """Response tokens of the token's whole sequence, at least 1."""
    all_tokens: int
    """Response tokens of the mini-batch, of all micro-batches and ranks, at least 1. Without those that corrections took out before."""
    all_sequences: int
    """Its sequences with a response token likewise."""
    ranks: dist.ProcessGroup | None = None
    """Ranks of context parallelism, each of which has its tokens of every sequence."""

    def log_ratio_T(self) -> Tensor:
        """log(policy / old policy)"""
        return self.logp_T - self.old_logp_T

    def ratio_T(self) -> Tensor:
        """policy / old policy"""
        return self.log_ratio_T().clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()

    def log_rho_T(self) -> Tensor:
        """log(old policy / server), without gradient."""
        return self.old_logp_T - self.rollout_logp_T

    def sums_T(self, values_T: Tensor) -> Tensor:
        """[T]: for every token the sum of its sequence's masked values on all ranks, with gradient. Collective over them."""
        # In float64: the order of additions on a GPU is not fixed, and ranks must not differ about a bound.
        held_T = torch.where(self.mask_T, values_T, 0.0).double()
        sums = held_T.new_zeros(self.num_sequences).index_add(0, self.sequence_T, held_T)
        if self.ranks is not None:
            sums = _SumOverRanks.apply(sums, self.ranks)
        return sums.to(values_T.dtype)[self.sequence_T]

    def means_T(self, values_T: Tensor) -> Tensor:
        """The mean likewise."""
        return self.sums_T(values_T) / self.tokens_T

    def largest_T(self, values_T: Tensor) -> Tensor:
        """The largest likewise, without gradient."""
        held = torch.where(self.mask_T, values_T.detach(), -torch.inf)
        largest = values_T.new_full((self.num_sequences,), -torch.inf).scatter_reduce(0, self.sequence_T, held, "amax")
        if self.ranks is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.ranks)
        return largest[self.sequence_T]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    loss_T: Tensor
    """With gradient; 0 or anything outside the mask."""
    clipped_T: Tensor
    """bool: where the loss does not depend on the policy because of a bound; a second one, as the dual clip, has a metric of its own."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Values [T] whose mean over response tokens is told as `objective/NAME`; names as in the objective's `metric_names`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Answer of a correction."""

    weight_T: Tensor
    """Factor of the token's policy loss."""
    is_bounded_T: Tensor
    """bool: a bound has changed or zeroed the weight, or the token was dropped."""
    kept_T: Tensor | None = None
    """bool: tokens that stay in the mini-batch; None: all."""


def loss_by(objective: Any, tokens: TokenColumns) -> TokenLoss:
    """Answer of an objective. DataError for a column of another shape than the tokens': torch would spread it over them, and the loss be
    another."""
    found: TokenLoss = objective.token_loss(tokens)
    _require_tokens(tokens, "algorithm.objective", {"loss_T": found.loss_T, "clipped_T": found.clipped_T, **found.metrics})
    if tokens.logp_T.requires_grad and not found.loss_T.requires_grad:
        raise DataError("algorithm.objective returned loss_T without a gradient: must be made of logp_T, or nothing would be trained")
    return found


def weights_by(correction: Any, tokens: TokenColumns) -> Weights:
    """Answer of a correction, likewise."""
    found: Weights = correction.weights(tokens)
    kept = {} if found.kept_T is None else {"kept_T": found.kept_T}
    _require_tokens(tokens, "algorithm.corrections", {"weight_T": found.weight_T, "is_bounded_T": found.is_bounded_T, **kept})
    return found


def _require_tokens(tokens: TokenColumns, whose: str, returned: Mapping[str, Any]) -> None:
    wanted = tuple(tokens.mask_T.shape)
    for name, column in returned.items():
        shape = tuple(getattr(column, "shape", ()))
        if shape != wanted:
            raise DataError(f"{whose} returned {name} of shape {shape}: must be {wanted}, a value for every token")


class _SumOverRanks(torch.autograd.Function):
    """A sum of all ranks on all ranks. Each rank's loss is a part of one, so that a gradient is the sum of all ranks' too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: dist.ProcessGroup) -> Tensor:
        ctx.ranks = ranks
        total = values.clone()
        dist.all_reduce(total, group=ranks)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.ranks)
        return total, None
