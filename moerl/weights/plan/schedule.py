"""When each bucket of a push travels, and what follows from the order. Pure.

Rounds in which every rank sends at most one and every reader, or relay, receives at most one. Over a network this is a coloring of the
edges of a bipartite multigraph (trainer ranks, GPUs of the rollout; an edge is a bucket): first fit, by groups that belong together. On one
host a bucket may have several readers.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_

from moerl.types.push import Bucket
from moerl.weights.plan.transfer_plan import TransferPlan

Edge = tuple[int, Sequence[int]]
"""Source and targets of a bucket."""


def first_fit(groups: Iterable[Sequence[Edge]]) -> list[list[int]]:
    """By group and edge the first round in which its source and none of its targets is busy with one before; but none of a group before the
    round in which the last of them could have been, so that they come at about one time."""
    sending, receiving = Counter[int](), Counter[int]()  # bit r: busy in round r
    found = []
    for group in groups:
        begin = max((_first_free(_busy(edge, sending, receiving)) for edge in group), default=0)
        rounds = []
        for source, targets in group:
            before = (1 << begin) - 1
            rounds.append(_first_free(_busy((source, targets), sending, receiving) | before))
            sending[source] |= 1 << rounds[-1]
            for target in targets:
                receiving[target] |= 1 << rounds[-1]
        found.append(rounds)
    return found


def _busy(edge: Edge, sending: Counter[int], receiving: Counter[int]) -> int:
    source, targets = edge
    return reduce(or_, (receiving[target] for target in targets), sending[source])


def _first_free(busy: int) -> int:
    """The lowest bit that is not set."""
    return (~busy & (busy + 1)).bit_length() - 1


def seconds(buckets: Iterable[Bucket], *, bytes_per_second: float) -> float:
    """Until the last of `buckets`, in the order of their rounds, is over the network: each begins when both its cards are through with
    those before. What its own node's rank has crosses none."""
    sending, receiving = defaultdict[int, float](float), defaultdict[int, float](float)
    for bucket in buckets:
        if bucket.relay == bucket.sender:
            continue
        source, target = bucket.sender, bucket.readers[0] if bucket.relay is None else bucket.relay
        end = max(sending[source], receiving[target]) + bucket.num_bytes / bytes_per_second
        sending[source] = receiving[target] = end
    return max(receiving.values(), default=0.0)


def incomplete_bytes(buckets: Iterable[Bucket], tensors: Mapping[str, int]) -> int:
    """The most of one reader at a time, in the order of `buckets`: of all tensors that have begun to come in pieces and are not complete,
    whole. `tensors`: bytes by name."""
    left: dict[tuple[int, str], int] = {}
    held, most = Counter[int](), 0
    if not any(tensors.values()):
        return 0
    pieces = ((bucket, entry) for bucket in buckets for entry in bucket.entries if entry.num_bytes < tensors[entry.name])
    for bucket, entry in pieces:
        for reader in bucket.readers:
            if (reader, entry.name) not in left:
                left[reader, entry.name] = tensors[entry.name]
                held[reader] += tensors[entry.name]
                most = max(most, held[reader])
            left[reader, entry.name] -= entry.num_bytes
            if left[reader, entry.name] == 0:
                held[reader] -= tensors[entry.name]
    return most


def bound_seconds(plan: TransferPlan, *, bytes_per_second: float) -> float:
    """No schedule of this plan is faster: what the busiest card sends or receives."""
    return float(max(plan.sent().max(), plan.received().max())) / bytes_per_second
