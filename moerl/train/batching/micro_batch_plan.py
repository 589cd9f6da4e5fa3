"""Which sequence goes into which micro-batch of which data-parallel rank: pure functions over numpy, the same plan on every rank.

A round is the r-th micro-batch of every rank. Ranks that share experts wait for each other in every round, others only at the end.

Invariants, by the names of their tests:
* covers_once: every sequence is in exactly one micro-batch.
* within_budget: no micro-batch is longer than the token budget, padding included.
* equal_counts: every rank has the same number of micro-batches, at least one, a multiple of `count_multiple`.
* fewest_rounds: as many as first-fit decreasing needs.
* no_needless_empties: a micro-batch is empty only if there are fewer sequences than micro-batches.
* costliest_first: the costs of a rank's micro-batches fall, so long sequences meet in the same rounds.
* balanced: no rank has more than the mean and one full micro-batch; without a tight budget, than the mean and one sequence.
* even_rounds: where ranks wait, no micro-batch costs more than one of an earlier round, and the totals of two ranks differ by at most
  the largest difference inside one round.
* deterministic: the plan is a function of its arguments.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from moerl.config.schema.train_config import TrainConfig
from moerl.train.batching.token_costs import sequence_costs
from moerl.types.errors import ConfigError, Problem

Bins = list[list[int]]

Number = TypeVar("Number", int, np.ndarray)

_FULL_ROUNDS = (0, 1, 4)
"""How many first rounds are tried with the longest sequences packed as tightly as they go, rather than spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Cost of a plan, in tokens; add the mini-batches of a step up. See `sequence_costs`."""

    mean: float
    """Mean of the ranks' totals: what each would take if nothing were uneven."""
    busiest: float
    """The largest of the ranks' totals: what all take if they wait once, at the end."""
    rounds: float
    """The costliest micro-batches of all rounds: what all take if they wait in every round."""

    @classmethod
    def of(cls, plan: Sequence[Bins], lengths: np.ndarray, *, sequence_multiple: int, attention_tokens: float) -> "Balance":
        costs = sequence_costs(round_up(np.asarray(lengths, dtype=np.int64), sequence_multiple), attention_tokens)
        per_rank = np.array([[costs[members].sum() for members in rank] for rank in plan])
        totals = per_rank.sum(axis=1)
        return cls(mean=float(totals.mean()), busiest=float(totals.max()), rounds=float(per_rank.max(axis=0).sum()))

    @property
    def rank_imbalance(self) -> float:
        """At least 1; 1 for a plan without sequences."""
        return self.busiest / self.mean if self.mean else 1.0

    @property
    def round_imbalance(self) -> float:
        """At least `rank_imbalance`."""
        return self.rounds / self.mean if self.mean else 1.0

    def __add__(self, other: "Balance") -> "Balance":
        return Balance(mean=self.mean + other.mean, busiest=self.busiest + other.busiest, rounds=self.rounds + other.rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequences:
    """Sequences that there are to plan, and within which limits. A slot is a sequence's padded length."""

    slots: np.ndarray  # int64
    costs: np.ndarray  # float64
    longest_first: np.ndarray  # int64, indices
    capacity: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlanner:
    """Everything but the lengths: driver and ranks make the same plan."""

    num_ranks: int
    token_budget: int
    token_multiple: int
    """Micro-batches are padded to a multiple of it."""
    attention_tokens: float
    sequence_multiple: int = 1
    """Their sequences likewise: 2 * cp, as context parallelism cuts every sequence into that many chunks."""
    count_multiple: int = 1
    """Ranks have a multiple of it as micro-batches: pp for an interleaved pipeline."""
    waits_in_rounds: bool = False
    """The sum of the costliest micro-batches of all rounds is made small, not the largest total of a rank."""

    @classmethod
    def of(cls, train: TrainConfig, attention_tokens: float) -> "MicroBatchPlanner":
        return cls(
            num_ranks=train.layout.dp,
            token_budget=train.micro_batch_tokens,
            token_multiple=train.token_multiple,
            attention_tokens=attention_tokens,
            sequence_multiple=train.layout.sequence_multiple,
            count_multiple=train.layout.count_multiple,
            waits_in_rounds=train.layout.waits_in_rounds,
        )

    def plan(self, lengths: Sequence[int] | np.ndarray) -> list[Bins]:
        """Sequence indices, per data-parallel rank, per micro-batch. Raises ConfigError for a sequence over the budget."""
        assert self.token_multiple % self.sequence_multiple == 0, f"{self} must have a multiple of sequence_multiple as token_multiple"
        slots = round_up(np.asarray(lengths, dtype=np.int64), self.sequence_multiple)
        _check_fits(slots, token_budget=self.token_budget, token_multiple=self.token_multiple)
        sequences = _Sequences(
            slots=slots,
            costs=sequence_costs(slots, self.attention_tokens),
            longest_first=np.argsort(-slots, kind="stable"),
            capacity=self.token_budget // self.token_multiple * self.token_multiple,
            num_ranks=self.num_ranks,
        )
        fitted = _first_fit(sequences)
        num_rounds = round_up(-(-max(len(fitted), 1) // self.num_ranks), self.count_multiple)
        by_rank, is_even = (None, False) if self.waits_in_rounds else _rank_by_rank(sequences, num_rounds)
        candidates = [] if by_rank is None else [by_rank]
        if not is_even:
            candidates += _round_by_round(sequences, fitted, num_rounds)

        def cost(plan: list[Bins]) -> float:
            balance = self.balance(slots, plan)
            return balance.rounds if self.waits_in_rounds else balance.busiest

        return min(candidates, key=cost)

    def plan_step(self, lengths: np.ndarray, num_updates: int) -> list[Bins]:
        """The plans of the mini-batches of a step, one after the other, of the sequences of the whole batch.

        What runs in other micro-batches rounds differently: with this plan a log-prob pass gives the update's own numbers, to the bit.
        """
        steps: list[Bins] = [[] for _ in range(self.num_ranks)]
        for part in split_mini_batches(len(lengths), num_updates):
            for step, bins in zip(steps, self.plan(lengths[part]), strict=True):
                step += [part[members].tolist() for members in bins]
        return steps

    def balance(self, lengths: np.ndarray, plan: Sequence[Bins]) -> Balance:
        return Balance.of(plan, lengths, sequence_multiple=self.sequence_multiple, attention_tokens=self.attention_tokens)


def split_mini_batches(num_sequences: int, num_updates: int) -> list[np.ndarray]:
    """Sequence indices of consecutive mini-batches, equal in number of sequences up to one.

    Fewer than `num_updates` if there are fewer sequences: an update on nothing would still move the weights by momentum.
    """
    return np.array_split(np.arange(num_sequences), max(min(num_updates, num_sequences), 1))


def round_up(number: Number, multiple: int) -> Number:
    return -(-number // multiple) * multiple


def _check_fits(slots: np.ndarray, *, token_budget: int, token_multiple: int) -> None:
    longest = int(slots.max(initial=0))
    needed = round_up(longest, token_multiple)
    if needed > token_budget:
        problem = Problem(
            path="train.micro_batch_tokens",
            value=token_budget,
            rule=f"must be at least {needed} for the longest sequence, {longest} tokens in multiples of {token_multiple}",
            reason="a sequence is never split over micro-batches, and a micro-batch is padded to the multiple the layout demands",
            fix=f"micro_batch_tokens={needed} or more, or a smaller model.max_context",
        )
        raise ConfigError([problem])


def _first_fit(sequences: _Sequences) -> Bins:
    """First-fit decreasing: close to the fewest micro-batches (at most 11/9 of them + 1), the longest sequences together."""
    bins: Bins = []
    room = np.full(len(sequences.slots), sequences.capacity)  # one bin per sequence at most
    for index, slot in zip(sequences.longest_first.tolist(), sequences.slots[sequences.longest_first].tolist(), strict=True):
        chosen = int((room[: len(bins) + 1] >= slot).argmax())
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(index)
        room[chosen] -= slot
    return bins


# -- ranks first: even totals ----------------------------------------------------------------------------------


def _rank_by_rank(sequences: _Sequences, num_rounds: int) -> tuple[list[Bins] | None, bool]:
    """Sequences to ranks, even in cost; if that does not fit, even in tokens and in attention. Then each rank's to micro-batches. None if
    neither fits; and whether the totals are known to differ by one sequence at most."""
    tokens, attention = sequences.slots.astype(np.float64), sequences.costs - sequences.slots
    both = np.stack([tokens / max(tokens.mean(), 1), attention / max(attention.mean(), 1e-9)]) if len(tokens) else np.zeros((2, 0))
    for loads, is_even in ((sequences.costs[None] / max(sequences.costs.sum(), 1), True), (both, False)):
        ranks = _to_ranks(sequences, loads)
        plan = [_to_micro_batches(sequences, members, num_rounds) for members in ranks]
        complete = [bins for bins in plan if bins is not None]
        if len(complete) == len(plan) and _no_needless_empties(complete, len(tokens)):
            return complete, is_even
    return None, False


def _to_ranks(sequences: _Sequences, loads: np.ndarray) -> Bins:
    """Each sequence, longest first, to the rank whose load points least in the direction of the sequence's own.

    `loads` [kinds, num_sequences]. With one kind that is the rank with the least (longest processing time first, R. L. Graham 1969).
    """
    ranks: Bins = [[] for _ in range(sequences.num_ranks)]
    totals = np.zeros((sequences.num_ranks, len(loads)))
    for index in sequences.longest_first.tolist():
        chosen = int((totals @ loads[:, index]).argmin())
        ranks[chosen].append(index)
        totals[chosen] += loads[:, index]
    return ranks


def _to_micro_batches(sequences: _Sequences, members: list[int], num_bins: int) -> Bins | None:
    """Even in cost if they fit so, else as tightly as they fit; costliest first. None if they do not."""
    bins = _least_cost(sequences, members, num_bins)
    bins = _tightest(sequences, members, num_bins) if bins is None else bins
    return None if bins is None else _costliest_first(bins, sequences.costs)


def _tightest(sequences: _Sequences, members: list[int], num_bins: int) -> Bins | None:
    """Best-fit decreasing."""
    bins: Bins = [[] for _ in range(num_bins)]
    room = np.full(num_bins, sequences.capacity)
    for index in members:
        left = room - sequences.slots[index]
        chosen = int(np.argmin(np.where(left >= 0, left, sequences.capacity)))
        if left[chosen] < 0:
            return None
        bins[chosen].append(index)
        room[chosen] = left[chosen]
    return bins


# -- rounds first: even micro-batches --------------------------------------------------------------------------


def _round_by_round(sequences: _Sequences, fitted: Bins, num_rounds: int) -> Iterator[list[Bins]]:
    """Micro-batches first, then dealt to the ranks; at least one plan."""
    costs, num_bins = sequences.costs, num_rounds * sequences.num_ranks
    costliest, found = _costliest_first(fitted, costs), False
    for num_full in (count * sequences.num_ranks for count in _FULL_ROUNDS if count < num_rounds):
        packed = {index for members in costliest[:num_full] for index in members}
        rest = [index for index in sequences.longest_first.tolist() if index not in packed]
        spread = _least_cost(sequences, rest, num_bins - num_full)
        if spread is not None and len(costliest) >= num_full:
            plan = _deal(costliest[:num_full] + spread, costs, sequences.num_ranks)
            if _no_needless_empties(plan, len(costs)):
                found = True
                yield plan
    if not found:
        yield _deal(_spread(fitted, num_bins), costs, sequences.num_ranks)


def _least_cost(sequences: _Sequences, members: Sequence[int], num_bins: int) -> Bins | None:
    """Each sequence, longest first, into the cheapest micro-batch with room; None if one finds no room."""
    bins: Bins = [[] for _ in range(num_bins)]
    room, bin_costs = np.full(num_bins, sequences.capacity), np.zeros(num_bins)
    # As lists: reading one number out of an array costs more than all else that is done with it here.
    for index, slot, cost in zip(members, sequences.slots[members].tolist(), sequences.costs[members].tolist(), strict=True):
        chosen = int(np.where(room >= slot, bin_costs, np.inf).argmin())
        if room[chosen] < slot:
            return None
        bins[chosen].append(index)
        room[chosen] -= slot
        bin_costs[chosen] += cost
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
    ordered = _costliest_first(bins, costs)
    plan: list[Bins] = [[] for _ in range(num_ranks)]
    totals = np.zeros(num_ranks)
    for first in range(0, len(ordered), num_ranks):
        for rank, members in zip(np.argsort(totals, kind="stable"), ordered[first : first + num_ranks], strict=True):
            plan[rank].append(members)
            totals[rank] += costs[members].sum()
    return plan


def _costliest_first(bins: Bins, costs: np.ndarray) -> Bins:
    return sorted((sorted(members) for members in bins), key=lambda members: -float(costs[members].sum()))


def _no_needless_empties(plan: list[Bins], num_sequences: int) -> bool:
    sizes = [len(members) for rank in plan for members in rank]
    return sizes.count(0) == max(len(sizes) - num_sequences, 0)
