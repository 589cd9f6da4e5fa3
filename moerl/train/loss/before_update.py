"""Knowledge that a mini-batch's update begins with: counts of all ranks, what corrections say of whole sequences, what an objective picks.

On a rank, about the sequences of its data-parallel rank, whole: context parallelism cuts them later.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.columns import TokenColumns, weights_by
from moerl.algorithms.mini_batch_loss import Loss
from moerl.train.batching.packed_sequences import PackedMicroBatch, pack
from moerl.train.batching.rank_share import Share, spans
from moerl.train.loss.batch_loss import Denominators, LossColumns, at_least_float32, token_columns
from moerl.types.batch import Batch, TrainBatch

Reduce = Callable[[Tensor], None]
"""Sum over data-parallel ranks, in place."""


def corrected(own: TrainBatch, loss: Loss, counts: Denominators, reduce: Reduce) -> tuple[TrainBatch, Denominators]:
    """Sequences with the columns of corrections that look at them before the update, and the counts that follow; collective where there
    are any, or streams beside the objective's."""
    if not loss.corrections_before and own.ce_weight_T is None and own.kl_weight_T is None and own.rl_weight_T is None:
        return own, counts
    if own.rl_weight_T is not None:
        own = replace(own, kept_T=own.rl_weight_T != 0)
    if loss.corrections_before:
        own = _with_corrections(own, loss, counts, reduce)
    return own, _counted(own, counts, reduce)


def _with_corrections(own: TrainBatch, loss: Loss, counts: Denominators, reduce: Reduce) -> TrainBatch:
    """First what leaves the mini-batch: each looks at what those before it left, and all others at the rest."""
    assert own.old_logprobs_T is not None, "corrections before the update need old log-probs"
    wide = np.float64 if own.old_logprobs_T.dtype == np.float64 else np.float32
    bounded_T = np.zeros(len(own.token_ids_T), dtype=bool)
    factors = []
    for correction in loss.corrections_before:
        micro, tokens = whole_columns(own, counts)
        weights = weights_by(correction, tokens)
        if weights.kept_T is None:
            factors.append(correction)
            continue
        if (weights.weight_T != 1).any():
            factors.append(correction)
        kept_T = to_tokens(weights.kept_T, micro, fill=False)
        own = replace(own, kept_T=kept_T if own.kept_T is None else own.kept_T & kept_T)
        bounded_T |= to_tokens(weights.is_bounded_T, micro, fill=False)
    micro, tokens = whole_columns(own, counts)
    weight_T = torch.ones_like(tokens.logp_T)
    for correction in factors:
        weights = weights_by(correction, tokens)
        factor_T = weights.weight_T
        if getattr(correction, "is_normalized", False):
            sums = torch.stack([torch.where(tokens.mask_T, factor_T, 0.0).double().sum(), tokens.mask_T.double().sum()])
            reduce(sums)
            factor_T = factor_T / (sums[0] / sums[1].clamp(min=1)).clamp(min=1e-12).to(factor_T.dtype)
        weight_T = weight_T * factor_T
        bounded_T |= to_tokens(weights.is_bounded_T & tokens.mask_T, micro, fill=False)
    return replace(own, correction_T=to_tokens(weight_T, micro, fill=1.0).astype(wide), bounded_T=bounded_T)


def _counted(own: TrainBatch, counts: Denominators, reduce: Reduce) -> Denominators:
    trained_T = own.response_mask_T if own.kept_T is None else own.response_mask_T & own.kept_T
    trained = np.add.reduceat(np.append(trained_T, False), own.offsets[:-1]) if own.num_sequences else np.zeros(0)
    local = [trained_T.sum(), (trained > 0).sum(), *(0 if w is None else (w != 0).sum() for w in (own.ce_weight_T, own.kl_weight_T))]
    totals = torch.tensor([int(each) for each in local], dtype=torch.int64)
    reduce(totals)
    num_tokens, num_sequences, num_ce, num_kl = totals.tolist()
    return replace(counts, num_tokens=num_tokens, num_sequences=num_sequences, num_ce=num_ce, num_kl=num_kl)


def selected(share: Share, whole: Batch, counts: Denominators, logprobs_T: np.ndarray, loss: Loss, reduce: Reduce) -> Share:
    """With what the objective picks of the mini-batch `whole`, from its log-probs [T] under the policy as it is. Collective."""
    own, lengths = share.batch, whole.response_lengths
    micro, tokens = whole_columns(own, counts, share.gathered(logprobs_T, whole))
    statistics_kT = loss.objective.statistics(tokens).double().cpu()  # type: ignore[union-attr]
    # Response tokens of the mini-batch in its order; those that corrections took out are not present.
    own_N = torch.from_numpy(spans(np.concatenate([[0], np.cumsum(lengths)]), share.sequences))
    is_response_T = own.response_mask_T
    columns = torch.zeros(len(statistics_kT) + 1, int(lengths.sum()), dtype=torch.float64)
    kept_T = np.ones(len(own.token_ids_T), dtype=bool) if own.kept_T is None else own.kept_T
    columns[0, own_N] = torch.from_numpy(kept_T[is_response_T].astype(np.float64))
    for row, values_T in enumerate(statistics_kT, 1):
        columns[row, own_N] = torch.from_numpy(to_tokens(values_T, micro, fill=0.0)[is_response_T])
    for column_N in columns:  # one at a time on the GPU: 8 bytes for each response token of the mini-batch
        reduce(column_N)
    present_N, chosen_N = columns[0] > 0, torch.zeros(columns.shape[1], dtype=torch.bool)
    chosen_N[present_N] = loss.objective.select(columns[1:, present_N])  # type: ignore[union-attr]
    selected_T = np.zeros(len(own.token_ids_T), dtype=bool)
    selected_T[is_response_T] = chosen_N[own_N].numpy()
    return replace(share, batch=replace(own, selected_T=selected_T))


def whole_columns(own: TrainBatch, counts: Denominators, logprobs_T: np.ndarray | None = None) -> tuple[PackedMicroBatch, TokenColumns]:
    """All sequences as one micro-batch, under log-probs [T]; without them, those of the old policy."""
    micro = pack(replace(own, routes_T=None, sets=None), range(own.num_sequences), 1)
    columns = LossColumns.of(micro, device="cpu")
    logp_T = columns.old_logprobs_T if logprobs_T is None else at_labels(torch.from_numpy(logprobs_T), micro)
    assert logp_T is not None, "a correction before the update needs old log-probs"
    return micro, token_columns(at_least_float32(logp_T), columns, counts)


def at_labels(values_T: Tensor, micro: PackedMicroBatch) -> Tensor:
    """Values of a batch's tokens where a micro-batch predicts them, else 0."""
    index_T = torch.from_numpy(micro.label_index_T)
    return torch.where(index_T >= 0, values_T[index_T.clamp(min=0)], 0.0) if len(values_T) else values_T.new_zeros(len(index_T))


def to_tokens(values_T: Tensor, micro: PackedMicroBatch, *, fill: float | bool) -> np.ndarray:
    """[T] of the batch, from values at label positions of a micro-batch of all its sequences; `fill` where there is no label."""
    found = values_T.detach().cpu().numpy()
    is_label = micro.label_index_T >= 0
    spread_T = np.full(int(micro.is_token_T.sum()), fill, dtype=found.dtype)
    spread_T[micro.label_index_T[is_label]] = found[is_label]
    return spread_T
