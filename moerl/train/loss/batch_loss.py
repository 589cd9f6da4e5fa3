"""The one place that masks, sums and scales a loss. Algorithms return per-token losses; nothing else divides.

The loss of a mini-batch is S_rl / N_rl + S_ce / N_ce + S_kl / N_kl: what an objective makes of the policy's own tokens, cross-entropy, and
the distance from a teacher, each with weights of its own for tokens and a count of its own.

Invariants, by the names of their tests:
* plain_sums: the contributions of all micro-batches and ranks add up to the loss of the mini-batch; no further division.
* split_free: loss, gradient and statistics do not depend on micro-batches, packing order, padding or a cut inside a sequence.
* masked_values: whatever stands outside the response mask, NaN and inf included, changes nothing.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moerl.algorithms.columns import TokenColumns, loss_by, weights_by
from moerl.algorithms.kl import kl_estimate
from moerl.algorithms.kl_formulas import EXPONENT_LIMIT
from moerl.algorithms.mini_batch_loss import Loss, ValueLossSettings
from moerl.train.batching.packed_sequences import PackedMicroBatch
from moerl.train.loss.loss_sums import LossSums, Observed, observed_sums
from moerl.types.batch import Batch

TEACHER_FALL = 0.2
"""Loss of probability since the rollout from which on a token is not taught."""
TEACHER_DRIFT = 1e-3
"""Weight of the squared log-ratio in distillation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Counts of one whole mini-batch, over every micro-batch and data-parallel rank."""

    num_tokens: int
    """Response tokens."""
    num_sequences: int
    """Sequences with at least one response token."""
    num_servers: int = 0
    """Servers whose tokens are compared."""
    num_ce: int = 0
    """Tokens whose weight of cross-entropy is not 0."""
    num_kl: int = 0
    """Tokens whose weight of the distance from a teacher is not 0."""

    def num_trained(self, loss: Loss | ValueLossSettings) -> int:
        """Tokens that any component of `loss` has, counted once for each."""
        has_own = isinstance(loss, ValueLossSettings) or loss.objective is not None
        return has_own * self.num_tokens + self.num_ce + self.num_kl

    @classmethod
    def of(cls, mini_batch: Batch) -> "Denominators":
        lengths = mini_batch.response_lengths
        return cls(num_tokens=int(lengths.sum()), num_sequences=int((lengths > 0).sum()), num_servers=mini_batch.num_servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossColumns:
    """Columns that the loss needs about each label position, on the device of the log-probs. See `PackedMicroBatch`."""

    response_mask_T: Tensor  # bool
    response_tokens_T: Tensor  # int64
    sequence_T: Tensor  # int64
    num_sequences: int
    rollout_logprobs_T: Tensor  # float32
    advantages_T: Tensor  # float32
    old_logprobs_T: Tensor | None = None  # float32; None: the old policy is the policy itself
    reference_logprobs_T: Tensor | None = None  # float32
    teacher_logprobs_T: Tensor | None = None  # float32
    rl_weight_T: Tensor | None = None  # float32; None: 1
    ce_weight_T: Tensor | None = None  # float32; None: 0
    kl_weight_T: Tensor | None = None  # float32; None: 0
    correction_T: Tensor | None = None  # float32
    kept_T: Tensor | None = None  # bool; None: True
    bounded_T: Tensor | None = None  # bool; None: False
    selected_T: Tensor | None = None  # bool
    proximal_T: Tensor | None = None  # float32
    values_T: Tensor | None = None  # float32
    server_T: Tensor | None = None  # int16
    trainer_logprobs_T: Tensor | None = None  # what is compared with the server's; None: the policy's as it is
    whole_logp_T: Tensor | None = None  # with gradient: of the whole vocabulary, where log-probs are of a part; None: they are the same

    @classmethod
    def of(cls, packed: PackedMicroBatch, *, device: torch.device | str) -> "LossColumns":
        def place(array: np.ndarray | None) -> Tensor | None:
            return None if array is None else torch.from_numpy(array).to(device)

        columns = {column.name: place(getattr(packed, column.name)) for column in fields(cls) if hasattr(packed, column.name)}
        return cls(num_sequences=packed.num_slots, **columns)  # type: ignore[arg-type]


def micro_batch_loss(
    logp_T: Tensor,
    entropy_T: Tensor,
    columns: LossColumns,
    loss: Loss,
    denominators: Denominators,
    ranks: dist.ProcessGroup | None = None,
) -> tuple[Tensor, LossSums]:
    """This micro-batch's share of the mini-batch loss, with gradient, and its statistics.

    `logp_T`, `entropy_T` [T]: the trainer's values at every label position. `ranks`: of context parallelism, if there is any. A micro-batch
    of padding alone gives a 0 that still has a gradient path, so that every rank runs the same backward collectives.
    """
    assert any(part is not None for part in (loss.objective, columns.ce_weight_T, columns.kl_weight_T)), "no token is trained by this loss"
    logp_T, entropy_T = at_least_float32(logp_T), at_least_float32(entropy_T)
    tokens = token_columns(logp_T, columns, denominators, ranks)
    # An empty component keeps the gradient path of a micro-batch that has none.
    total, none_T = torch.where(tokens.mask_T, logp_T, 0.0).sum() * 0.0, torch.zeros_like(tokens.mask_T)
    told = Observed(clipped_T=none_T, bounded_T=none_T)
    if loss.objective is not None:
        total, told = _rl(tokens, entropy_T, columns, loss)
    whole_T = logp_T if columns.whole_logp_T is None else at_least_float32(columns.whole_logp_T)
    if columns.ce_weight_T is not None:
        total = total + _weighted(-whole_T, columns.ce_weight_T, denominators.num_ce)
    distance_T = None
    if columns.kl_weight_T is not None:
        distance_T = _distance(whole_T, columns)
        total = total + _weighted(_from_teacher(distance_T, logp_T, columns), columns.kl_weight_T, denominators.num_kl)
    taught_T = None if columns.kl_weight_T is None else columns.kl_weight_T != 0
    with torch.no_grad():
        sampled_T = columns.response_mask_T
        compared_T = logp_T if columns.trainer_logprobs_T is None else columns.trainer_logprobs_T
        sums = observed_sums(
            total, tokens, told, sampled_T,
            logp_T=masked(compared_T, sampled_T), rollout_T=masked(columns.rollout_logprobs_T, sampled_T),
            entropy_T=masked(entropy_T, tokens.mask_T), metric_names=loss.metric_names,
            server_T=columns.server_T, num_servers=denominators.num_servers,
            distance_T=distance_T, taught_T=taught_T,
        )  # fmt: skip
    return total, sums


def token_columns(logp_T: Tensor, columns: LossColumns, denominators: Denominators, ranks: dist.ProcessGroup | None = None) -> TokenColumns:
    """Columns as objectives and corrections see them. Masked before any arithmetic: the gradient of torch.where is 0 there, while NaN * 0
    would be NaN."""
    mask_T = columns.response_mask_T if columns.kept_T is None else columns.response_mask_T & columns.kept_T
    logp_T = torch.where(mask_T, logp_T, 0.0)

    def column(values_T: Tensor) -> Tensor:
        return masked(values_T, mask_T).to(logp_T.dtype)

    return TokenColumns(
        logp_T=logp_T,
        whole_logp_T=logp_T if columns.whole_logp_T is None else torch.where(mask_T, at_least_float32(columns.whole_logp_T), 0.0),
        old_logp_T=_old_logprobs(logp_T, columns, mask_T),
        rollout_logp_T=column(columns.rollout_logprobs_T),
        advantage_T=column(columns.advantages_T),
        mask_T=mask_T,
        reference_logp_T=None if columns.reference_logprobs_T is None else column(columns.reference_logprobs_T),
        values_T=None if columns.values_T is None else column(columns.values_T),
        selected_T=columns.selected_T,
        sequence_T=columns.sequence_T,
        num_sequences=columns.num_sequences,
        tokens_T=columns.response_tokens_T.to(logp_T.dtype).clamp(min=1),
        all_tokens=max(denominators.num_tokens, 1),
        all_sequences=max(denominators.num_sequences, 1),
        ranks=ranks,
    )


def _old_logprobs(logp_T: Tensor, columns: LossColumns, mask_T: Tensor) -> Tensor:
    """Without gradient, 0 outside of `mask_T`."""
    if columns.proximal_T is not None:
        # Between server and policy in log-space, by age (AReaL's approximation of a policy that is not computed).
        rollout_T, share_T = (masked(each, mask_T).to(logp_T.dtype) for each in (columns.rollout_logprobs_T, columns.proximal_T))
        return rollout_T + share_T * (masked(logp_T, mask_T) - rollout_T)
    return masked(logp_T if columns.old_logprobs_T is None else columns.old_logprobs_T, mask_T).to(logp_T.dtype)


def at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def masked(values_T: Tensor, mask_T: Tensor) -> Tensor:
    return torch.where(mask_T, at_least_float32(values_T.detach()), 0.0)


def _rl(tokens: TokenColumns, entropy_T: Tensor, columns: LossColumns, loss: Loss) -> tuple[Tensor, Observed]:
    assert loss.objective is not None
    found = loss_by(loss.objective, tokens)
    loss_T, weight_T = found.loss_T, None if columns.correction_T is None else masked(columns.correction_T, tokens.mask_T)
    bounded_T = torch.zeros_like(tokens.mask_T) if columns.bounded_T is None else columns.bounded_T
    for correction in loss.live_corrections:
        weights = weights_by(correction, tokens)
        assert weights.kept_T is None, f"{correction}: takes tokens out, so its needs must have old_logprobs: counts are known before"
        weight_T = weights.weight_T if weight_T is None else weight_T * weights.weight_T
        bounded_T = bounded_T | weights.is_bounded_T
    if weight_T is not None:
        loss_T = loss_T * weight_T.detach()
    if loss.kl_coefficient > 0:
        assert tokens.reference_logp_T is not None, "kl_coefficient > 0 needs reference log-probs"
        kl_T = kl_estimate(loss.kl_estimator, tokens.whole_logp_T, tokens.reference_logp_T, tokens.ratio_T())
        loss_T = loss_T + loss.kl_coefficient * kl_T
    if loss.drift_penalty > 0:
        loss_T = loss_T + loss.drift_penalty * tokens.log_ratio_T() ** 2
    if loss.entropy_bonus > 0:
        loss_T = loss_T - loss.entropy_bonus * torch.where(tokens.mask_T, entropy_T, 0.0)
    if columns.rl_weight_T is not None:
        loss_T = loss_T * masked(columns.rl_weight_T, tokens.mask_T)
    scale_T = _token_weights(tokens, loss)
    total = torch.where(tokens.mask_T, loss_T * scale_T, 0.0).sum()
    seen = Observed(
        clipped_T=found.clipped_T, metrics=found.metrics, weight_T=weight_T, bounded_T=bounded_T, dropped_T=_dropped(columns)
    )  # fmt: skip
    return total, seen


def _dropped(columns: LossColumns) -> Tensor | None:
    """Tokens that corrections took out, not those that have no weight."""
    if columns.kept_T is None:
        return None
    return ~columns.kept_T if columns.rl_weight_T is None else ~columns.kept_T & (columns.rl_weight_T != 0)


def _weighted(loss_T: Tensor, weight_T: Tensor, count: int) -> Tensor:
    """Sum over the tokens with a weight / their number in the mini-batch."""
    used_T = weight_T != 0
    used_loss_T = torch.where(used_T, loss_T, 0.0) * masked(weight_T, used_T)
    return (used_loss_T * (1.0 / max(count, 1))).sum()


def _distance(logp_T: Tensor, columns: LossColumns) -> Tensor:
    """log-prob - teacher's, without gradient, where there is a weight."""
    assert columns.teacher_logprobs_T is not None and columns.kl_weight_T is not None, "kl_weight_T needs a teacher's log-probs"
    used_T = columns.kl_weight_T != 0
    return masked(logp_T, used_T) - masked(columns.teacher_logprobs_T, used_T)


def _from_teacher(distance_T: Tensor, logp_T: Tensor, columns: LossColumns) -> Tensor:
    """On-policy distillation with the distance for -A, as in prime-rl (`ref_kl`): its gradient is that of KL(policy || teacher). Tokens
    that the policy did not produce have no old policy, and a ratio of 1."""
    assert columns.kl_weight_T is not None
    used_T = columns.kl_weight_T != 0
    own_T, is_sampled_T = torch.where(used_T, logp_T, 0.0), columns.response_mask_T & used_T
    old_T = torch.where(is_sampled_T, _old_logprobs(own_T, columns, is_sampled_T), own_T.detach())
    d_T = own_T - old_T
    has_fallen_T = is_sampled_T & (own_T.detach().exp() - masked(columns.rollout_logprobs_T, is_sampled_T).exp() < -TEACHER_FALL)
    ratio_T = d_T.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
    return torch.where(has_fallen_T, 0.0, distance_T * ratio_T) + TEACHER_DRIFT * d_T**2


def _token_weights(tokens: TokenColumns, loss: Loss) -> Tensor | float:
    """Weights by which a response token's loss is multiplied, in their own dtype. Counts of 0 occur only where there is nothing to
    weigh."""
    match loss.normalize_by:
        case "token":
            return 1.0 / tokens.all_tokens
        case "sequence":
            return 1.0 / (tokens.tokens_T * tokens.all_sequences)
        case "sequence_sum":
            return 1.0 / tokens.all_sequences
    assert loss.fixed_length is not None, "normalize_by=fixed_length needs fixed_length"
    return 1.0 / (tokens.all_sequences * loss.fixed_length)
