"""When each bucket of a push travels: rounds in which every rank sends at most one and every reader receives at most one.

Over a network this is a coloring of the edges of a bipartite multigraph (trainer ranks, GPUs of the rollout; an edge is a bucket): first
fit. On one host a bucket may have several readers.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_

from moerl.push_types import Bucket
from moerl.weights.plan import Plan


def first_fit(edges: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
    """The first round in which the source and none of the targets is busy with an edge before."""
    sending, receiving = Counter[int](), Counter[int]()  # bit r: busy in round r
    rounds = []
    for source, targets in edges:
        busy = reduce(or_, (receiving[target] for target in targets), sending[source])
        free = ~busy & (busy + 1)  # the lowest bit that is not set
        sending[source] |= free
        for target in targets:
            receiving[target] |= free
        rounds.append(free.bit_length() - 1)
    return rounds


def seconds(buckets: Iterable[Bucket], *, bytes_per_second: float) -> float:
    """Of their rounds, if all cards wait for each other after every one."""
    largest = defaultdict[int, int](int)
    for bucket in buckets:
        largest[bucket.round] = max(largest[bucket.round], bucket.num_bytes)
    return sum(largest.values()) / bytes_per_second


def bound_seconds(plan: Plan, *, bytes_per_second: float) -> float:
    """No schedule of this plan is faster: what the busiest card sends or receives."""
    return float(max(plan.sent().max(), plan.received().max())) / bytes_per_second
