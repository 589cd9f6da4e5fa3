"""Sequences to micro-batches and back: pure functions over numpy, the same plan on every rank.

Invariants, by the names of their tests:
* covers_once: every sequence is in exactly one micro-batch.
* within_budget: no micro-batch is longer than the token budget, padding included.
* equal_counts: every rank has the same number of micro-batches, at least one, a multiple of `count_multiple`.
* no_needless_empties: a micro-batch is empty only if there are fewer sequences than micro-batches.
* balanced: round r holds the r-th micro-batch of every rank; costs fall from round to round, and the totals of two ranks differ by at
  most the largest difference inside one round. (Ranks that share experts wait for each other in every round.)
* deterministic: the plan is a function of its arguments.
* round_trip: `unpack_logprobs` puts every label's value at its token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from moerl.types import ConfigError, Problem, TrainBatch

Bins = list[list[int]]

Number = TypeVar("Number", int, np.ndarray)

ATTENTION_TOKENS = 24576
"""Length at which causal attention costs as much as the rest of a layer: 6 * hidden for a dense layer, here hidden 4096."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicroBatch:
    """Sequences end to end in one row of T tokens, each in a slot of its padded length, and one sequence of padding at the end.

    Columns with a label's value stand where the label is predicted: position t holds what belongs to token t + 1 of its sequence.
    The last token of a sequence and padding predict nothing: label 0, mask False, values 0.
    """

    token_ids_T: np.ndarray  # int64
    position_ids_T: np.ndarray  # int64, from 0 in every slot
    labels_T: np.ndarray  # int64
    label_index_T: np.ndarray  # int64, where the label stands in the batch's `_T` arrays; -1: no label
    response_mask_T: np.ndarray  # bool, the label is a response token
    response_tokens_T: np.ndarray  # int64, response tokens of the whole sequence; 0 where there is no label
    rollout_logprobs_T: np.ndarray  # float32
    advantages_T: np.ndarray  # float32
    old_logprobs_T: np.ndarray | None  # float32
    reference_logprobs_T: np.ndarray | None  # float32
    cu_seqlens: np.ndarray  # int32 [num_slots + 1], from 0 to the tokens of the whole micro-batch
    max_seqlen: int
    num_padding: int  # of the whole micro-batch
    members: tuple[int, ...]  # sequences of the batch, in order

    @property
    def num_positions(self) -> int:
        """Tokens of the whole micro-batch, padding included."""
        return int(self.cu_seqlens[-1])

    def part_of(self, rank: int, num_ranks: int) -> "PackedMicroBatch":
        """The tokens of one context-parallel rank; the bounds and counts stay those of the whole."""
        if num_ranks == 1:
            return self
        mine = zigzag_positions(self.cu_seqlens, rank, num_ranks)
        columns = {c.name: getattr(self, c.name) for c in fields(self) if c.name.endswith("_T")}
        return replace(self, **{name: column[mine] for name, column in columns.items() if column is not None})


def zigzag_positions(cu_seqlens: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
    """int64 [T / num_ranks]: of each sequence cut into 2 * num_ranks chunks, chunk `rank` and the one as far from the end.

    Causal attention costs the same on every rank then. Transformer Engine's and Megatron's order: megatron/core/utils.py,
    get_batch_on_this_cp_rank. Sequences must be multiples of 2 * num_ranks.
    """
    pieces = []
    for start, end in pairwise(cu_seqlens.tolist()):
        chunk = (end - start) // (2 * num_ranks)
        for index in (rank, 2 * num_ranks - 1 - rank):
            pieces.append(np.arange(start + index * chunk, start + (index + 1) * chunk))
    return np.concatenate(pieces)


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray,
    *,
    num_ranks: int,
    token_budget: int,
    token_multiple: int,
    sequence_multiple: int = 1,
    count_multiple: int = 1,
) -> list[Bins]:
    """Sequence indices, per data-parallel rank, per micro-batch.

    A micro-batch is padded to `token_multiple` tokens and each of its sequences to `sequence_multiple` (2 * cp: context parallelism
    cuts every sequence into that many chunks). `count_multiple` is pp for an interleaved pipeline. Raises ConfigError for a sequence
    over the budget.
    """
    assert token_multiple % sequence_multiple == 0, f"{token_multiple=} must be a multiple of {sequence_multiple=}"
    slots = _round_up(np.asarray(lengths, dtype=np.int64), sequence_multiple)
    capacity = token_budget // token_multiple * token_multiple
    _check_fits(slots, token_budget=token_budget, token_multiple=token_multiple)
    costs = sequence_costs(slots)
    longest_first = np.argsort(-slots, kind="stable")
    fitted = _first_fit(slots, longest_first, capacity)
    num_bins = _round_up(max(len(fitted), 1), num_ranks * count_multiple)
    bins = _least_cost(slots, costs, longest_first, capacity=capacity, num_bins=num_bins)
    return _deal(bins if bins is not None else _spread(fitted, num_bins), costs, num_ranks)


def sequence_costs(lengths: np.ndarray) -> np.ndarray:
    """In tokens: the length plus its attention term."""
    return lengths + lengths.astype(np.float64) ** 2 / ATTENTION_TOKENS


def split_mini_batches(batch: TrainBatch, num_updates: int) -> list[np.ndarray]:
    """Sequence indices of consecutive mini-batches, equal in number of sequences up to one.

    Fewer than `num_updates` if there are fewer sequences: an update on nothing would still move the weights by momentum.
    """
    return np.array_split(np.arange(batch.num_sequences), max(min(num_updates, batch.num_sequences), 1))


def pack(batch: TrainBatch, indices: Sequence[int], token_multiple: int, sequence_multiple: int = 1) -> PackedMicroBatch:
    """The named sequences as one row; no sequences give one dummy sequence of padding, so that the rank still runs."""
    chosen = np.asarray(indices, dtype=np.int64)
    starts, lengths = batch.offsets[chosen], batch.lengths[chosen]
    slots = _round_up(lengths, sequence_multiple)
    num_tokens = _round_up(max(int(slots.sum()), 2), token_multiple)
    boundaries = np.concatenate([[0], np.cumsum(slots)])
    if boundaries[-1] < num_tokens:
        boundaries = np.append(boundaries, num_tokens)

    source_T = np.full(num_tokens, -1, dtype=np.int64)
    label_index_T = np.full(num_tokens, -1, dtype=np.int64)
    response_tokens_T = np.zeros(num_tokens, dtype=np.int64)
    for slot, start, length in zip(boundaries[: len(starts)], starts, lengths, strict=True):
        source_T[slot : slot + length] = np.arange(start, start + length)
        label_index_T[slot : slot + length - 1] = np.arange(start + 1, start + length)
        response_tokens_T[slot : slot + length - 1] = batch.response_mask_T[start : start + length].sum()
    return PackedMicroBatch(
        token_ids_T=_gather(batch.token_ids_T, source_T),
        position_ids_T=np.arange(num_tokens) - np.repeat(boundaries[:-1], np.diff(boundaries)),
        labels_T=_gather(batch.token_ids_T, label_index_T),
        label_index_T=label_index_T,
        response_mask_T=_gather(batch.response_mask_T, label_index_T),
        response_tokens_T=response_tokens_T,
        rollout_logprobs_T=_gather(batch.rollout_logprobs_T, label_index_T),
        advantages_T=_gather(batch.advantages_T, label_index_T),
        old_logprobs_T=None if batch.old_logprobs_T is None else _gather(batch.old_logprobs_T, label_index_T),
        reference_logprobs_T=None if batch.reference_logprobs_T is None else _gather(batch.reference_logprobs_T, label_index_T),
        cu_seqlens=boundaries.astype(np.int32),
        max_seqlen=int(np.diff(boundaries).max()),
        num_padding=int((source_T < 0).sum()),
        members=tuple(map(int, indices)),
    )


def unpack_logprobs(pieces: Iterable[tuple[PackedMicroBatch, np.ndarray]], batch: TrainBatch, *, dtype: str = "float32") -> np.ndarray:
    """`dtype` [T] like `batch.token_ids_T`, from log-probs at the label positions of micro-batches packed from `batch`.

    First tokens, which nothing predicts, and sequences in no piece hold 0; the results of different ranks therefore add up.
    """
    logprobs_T = np.zeros(len(batch.token_ids_T), dtype=dtype)
    for packed, values_T in pieces:
        labelled_T = packed.label_index_T >= 0
        logprobs_T[packed.label_index_T[labelled_T]] = values_T[labelled_T]
    return logprobs_T


def _gather(column: np.ndarray, index_T: np.ndarray) -> np.ndarray:
    gathered_T = np.zeros(len(index_T), dtype=column.dtype)
    gathered_T[index_T >= 0] = column[index_T[index_T >= 0]]
    return gathered_T


def _round_up(number: Number, multiple: int) -> Number:
    return -(-number // multiple) * multiple


def _check_fits(slots: np.ndarray, *, token_budget: int, token_multiple: int) -> None:
    longest = int(slots.max(initial=0))
    needed = _round_up(longest, token_multiple)
    if needed > token_budget:
        problem = Problem(
            path="train.micro_batch_tokens",
            value=token_budget,
            rule=f"must be at least {needed} for the longest sequence, {longest} tokens in multiples of {token_multiple}",
            reason="a sequence is never split over micro-batches, and a micro-batch is padded to the multiple the layout demands",
            fix=f"micro_batch_tokens={needed} or more, or a smaller model.max_context",
        )
        raise ConfigError([problem])


def _first_fit(slots: np.ndarray, longest_first: np.ndarray, capacity: int) -> Bins:
    """First-fit decreasing: close to the fewest micro-batches (at most 11/9 of them + 1)."""
    bins: Bins = []
    room = np.full(len(slots), capacity)  # one bin per sequence at most
    for index in longest_first:
        chosen = int(np.argmax(room >= slots[index]))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(int(index))
        room[chosen] -= slots[index]
    return bins


def _least_cost(slots: np.ndarray, costs: np.ndarray, longest_first: np.ndarray, *, capacity: int, num_bins: int) -> Bins | None:
    """Each sequence, longest first, into the cheapest micro-batch with room; None if one finds no room."""
    bins: Bins = [[] for _ in range(num_bins)]
    tokens, bin_costs = np.zeros(num_bins, dtype=np.int64), np.zeros(num_bins)
    for index in longest_first:
        open_costs = np.where(tokens + slots[index] <= capacity, bin_costs, np.inf)
        chosen = int(np.argmin(open_costs))
        if open_costs[chosen] == np.inf:
            return None
        bins[chosen].append(int(index))
        tokens[chosen] += slots[index]
        bin_costs[chosen] += costs[index]
    return bins


def _spread(bins: Bins, num_bins: int) -> Bins:
    """The same bins plus new ones, each opened with a sequence from the bin that has most."""
    spread = [list(members) for members in bins] + [[] for _ in range(num_bins - len(bins))]
    for new in range(len(bins), num_bins):
        fullest = max(spread, key=len)
        if len(fullest) > 1:
            spread[new].append(fullest.pop())
    return spread


def _deal(bins: Bins, costs: np.ndarray, num_ranks: int) -> list[Bins]:
    """Rounds of one micro-batch per rank, costliest first; in a round the costliest goes to the rank with the least so far."""
    bin_costs = [float(costs[members].sum()) if members else 0.0 for members in bins]
    ordered = sorted(range(len(bins)), key=lambda b: (-bin_costs[b], b))
    plan: list[Bins] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for first in range(0, len(ordered), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, chosen in zip(ranks, ordered[first : first + num_ranks], strict=True):
            plan[rank].append(sorted(bins[chosen]))
            totals[rank] += bin_costs[chosen]
    return plan
