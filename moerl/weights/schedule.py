"""When each transfer of a plan runs: rounds in which every network card sends at most one bucket and receives at most one.

Coloring the edges of a bipartite multigraph (trainer ranks, GPUs of the rollout; an edge is a bucket): first fit. `schedule` counts rounds
before there are buckets; a run puts its own into rounds with the same rule (weights/deliveries.py).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moerl.weights.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Columns of equal length, a row for each bucket, by round."""

    round: np.ndarray  # int32, from 0
    source: np.ndarray  # int32, trainer rank
    target: np.ndarray  # int32, GPU of the rollout
    num_bytes: np.ndarray  # int64

    @property
    def num_rounds(self) -> int:
        return int(self.round.max()) + 1

    def seconds(self, bytes_per_second: float) -> float:
        """If all cards wait for each other after every round."""
        largest = np.zeros(self.num_rounds, dtype=np.int64)
        np.maximum.at(largest, self.round, self.num_bytes)
        return float(largest.sum()) / bytes_per_second


def schedule(plan: Plan, *, bucket_bytes: int) -> Schedule:
    """Everything one rank sends to one GPU is cut into buckets of equal size, none larger than `bucket_bytes`; the largest come first."""
    rows = _buckets(plan, bucket_bytes)
    rows.sort(key=lambda row: -row[0])
    rounds = first_fit((source, target) for _, source, target in rows)
    order = np.argsort(rounds, kind="stable")
    sizes, sources, targets = (np.array(column)[order] for column in zip(*rows, strict=True))
    return Schedule(round=np.array(rounds, dtype=np.int32)[order], source=sources, target=targets, num_bytes=sizes)


def first_fit(edges: Iterable[tuple[int, int]]) -> list[int]:
    """The first round in which neither (source, target) is busy with an edge before."""
    sending, receiving = Counter[int](), Counter[int]()  # bit r: busy in round r
    rounds = []
    for source, target in edges:
        busy = sending[source] | receiving[target]
        free = ~busy & (busy + 1)  # the lowest bit that is not set
        sending[source] |= free
        receiving[target] |= free
        rounds.append(free.bit_length() - 1)
    return rounds


def bound_seconds(plan: Plan, *, bytes_per_second: float) -> float:
    """No schedule of this plan is faster: what the busiest card sends or receives."""
    return float(max(plan.sent().max(), plan.received().max())) / bytes_per_second


def _buckets(plan: Plan, bucket_bytes: int) -> list[tuple[int, int, int]]:
    """(bytes, source, target)"""
    pairs = plan.network.source.astype(np.int64) * plan.rollout.num_gpus + plan.network.target
    found, where = np.unique(pairs, return_inverse=True)
    totals = np.zeros(len(found), dtype=np.int64)
    np.add.at(totals, where, plan.parts.num_bytes[plan.network.part])
    rows = []
    for pair, total in zip(found.tolist(), totals.tolist(), strict=True):
        source, target = divmod(pair, plan.rollout.num_gpus)
        number = max(1, -(-total // bucket_bytes))
        rows += [(total // number + (index < total % number), source, target) for index in range(number)]
    return rows
