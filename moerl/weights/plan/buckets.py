"""From a plan to what runs: the buckets that every trainer rank will fill, known before any byte moves. Pure.

A bucket has pieces of one batch for the same readers, in the order of their tensors' names, but scales next to their values. On one host,
what a plan passes on within a node is read by every GPU of it where the first of them reads it. Over a network (`by_node`) a bucket goes
to one GPU, and from there to others of its node; or to a trainer rank of the node, which all of them read it from (`Bucket.relay`).
Every rank sends, and every reader reads, in the order of the schedule's rounds.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf
from operator import or_
from typing import NamedTuple

from moerl.models.expert_stacks import stack_of, stored_name
from moerl.types.errors import WeightError
from moerl.types.push import Bucket, BucketEntry, Manifest, Piece, TensorSpec
from moerl.weights.plan.transfer_plan import PlannedTensor, TransferPlan

ALIGNMENT = 64
"""Alignment of every piece in a bucket, in bytes: a cache line, and a multiple of every element size."""

Job = tuple[Bucket, ...]
"""Buckets that one trainer rank sends in every push."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliveries:
    tensors: tuple[TensorSpec, ...]
    jobs: Mapping[int, Job]
    """By trainer rank; only those that send."""


def deliveries(plan: TransferPlan, *, bucket_bytes: int, by_node: bool = False) -> Deliveries:
    """A piece larger than `bucket_bytes` travels alone, or with its scales only."""
    groups: dict[_Group, list[Bucket]] = defaultdict(list)
    for (group, sender, readers), parts in sorted(_by_readers(plan, by_node=by_node).items()):
        relay = _relay(plan, sender, readers[0])
        for entries in _buckets(list(_units(plan, parts)), bucket_bytes):
            groups[group].append(
                Bucket(sender=sender, index=0, num_bytes=_end(entries), entries=tuple(entries), readers=readers, relay=relay)
            )
    jobs: dict[int, list[Bucket]] = {}
    for bucket in _in_rounds(_by_turns(groups, plan.layout.pp), by_node=by_node):
        mine = jobs.setdefault(bucket.sender, [])
        mine.append(replace(bucket, index=len(mine)))
    return Deliveries(tensors=stored_specs(plan.tensors), jobs={sender: tuple(buckets) for sender, buckets in jobs.items()})


def relayed(jobs: Mapping[int, Job]) -> dict[int, Job]:
    """By trainer rank the buckets that it gets from others for the readers of its node, in order; only those that get some."""
    found: dict[int, list[Bucket]] = defaultdict(list)
    for bucket in in_order(jobs):
        if bucket.lender != bucket.sender:
            found[bucket.lender].append(bucket)
    return {rank: tuple(buckets) for rank, buckets in found.items()}


def in_order(jobs: Mapping[int, Job]) -> list[Bucket]:
    """All buckets in the one order that every rank and every reader keeps to, whatever it has of them: so that none waits for one that
    waits for it."""
    return list(heapq.merge(*jobs.values(), key=lambda bucket: (bucket.round, bucket.sender)))


def manifest_of(found: Deliveries, digests: Mapping[int, Sequence[str]], *, version: int) -> Manifest:
    """`digests`: by trainer rank, of its job's entries in their order. WeightError if ranks that hold the same do not agree."""
    held: dict[tuple[str, tuple[int, ...]], tuple[BucketEntry, str, list[int]]] = {}
    for sender, job in found.jobs.items():
        entries = (entry for bucket in job for entry in bucket.entries)
        for entry, digest in zip(entries, digests[sender], strict=True):
            _, other, ranks = held.setdefault((entry.name, entry.start), (entry, digest, [sender]))
            if other != digest:
                raise WeightError(
                    f"tensor {entry.name!r} at {list(entry.start)}: trainer ranks {ranks[0]} and {sender} hold copies of it, "
                    "and their bytes differ: the trainer's replicas have diverged; resume from a checkpoint"
                )
            if ranks[-1] != sender:
                ranks.append(sender)
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for entry, digest, ranks in held.values():
        pieces[entry.name].append(Piece(start=entry.start, shape=entry.shape, ranks=tuple(ranks), digest=digest))
    return Manifest(version=version, tensors=found.tensors, pieces={name: tuple(boxes) for name, boxes in pieces.items()})


def stored_specs(tensors: Sequence[PlannedTensor]) -> tuple[TensorSpec, ...]:
    """As checkpoints hold them: stacks whole."""
    num_parts = Counter(stored_name(tensor.name) for tensor in tensors)
    found: dict[str, TensorSpec] = {}
    for tensor in tensors:
        spec, name = tensor.spec, stored_name(tensor.name)
        found[name] = spec if name == spec.name else replace(spec, name=name, shape=(num_parts[name], *spec.shape))
    return tuple(found.values())


class _Group(NamedTuple):
    """Key of buckets that should come together: a batch, where it is read."""

    is_late: bool
    """Experts, which go to fewer readers, go before all else."""
    batch: int
    stage: int
    place: int
    """The first of the readers of experts; the node of all else."""


def _by_turns(groups: Mapping[_Group, Sequence[Bucket]], num_stages: int) -> list[Sequence[Bucket]]:
    """Batch by batch. Places that the same rank serves begin with different stages, so that all stages have something to do."""
    num_served = Counter[tuple[bool, int, int]]()
    turns: dict[_Group, int] = {}
    for group in sorted(groups):
        served = group.is_late, group.batch, min(bucket.sender for bucket in groups[group])
        turns[group] = (group.stage + num_served[served]) % num_stages
        num_served[served] += 1
    order = sorted(groups, key=lambda group: (group.is_late, group.batch, turns[group], group.place))
    return [groups[group] for group in order]


def _relay(plan: TransferPlan, sender: int, reader: int) -> int | None:
    """Rank on the reader's node that lends it what the sender has."""
    if plan.relays is None:
        return None
    is_near = plan.relays.node_of_rank[sender] == plan.rollout.node_numbers()[reader]
    return sender if is_near else plan.relays.of_gpu[reader]


def _in_rounds(groups: Sequence[Sequence[Bucket]], *, by_node: bool) -> list[Bucket]:
    """By round, of which every sender, and every relay or reader, is in one bucket; of readers of a node, the first."""
    edges = [[(bucket.sender, _targets(bucket, by_node=by_node)) for bucket in group] for group in groups]
    placed = [
        replace(bucket, round=number)
        for group, rounds in zip(groups, first_fit(edges), strict=True)
        for bucket, number in zip(group, rounds, strict=True)
    ]
    return sorted(placed, key=lambda bucket: bucket.round)


def _targets(bucket: Bucket, *, by_node: bool) -> Sequence[int]:
    """Who is busy with it: a relay, unless it sends the bucket itself, or readers."""
    if bucket.relay is not None:
        return () if bucket.relay == bucket.sender else (bucket.relay,)
    return bucket.readers[:1] if by_node else bucket.readers


def _by_readers(plan: TransferPlan, *, by_node: bool) -> dict[tuple[_Group, int, tuple[int, ...]], list[int]]:
    """Parts by group, sender, and all who read them from there. `by_node`: readers are of one node, and the first gets the parts over the
    network."""
    passed_on: dict[tuple[int, int], list[int]] = defaultdict(list)
    for relay, target, part in zip(plan.spread.source.tolist(), plan.spread.target.tolist(), plan.spread.part.tolist(), strict=True):
        passed_on[part, relay].append(target)
    readers: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for source, target, part in zip(plan.network.source.tolist(), plan.network.target.tolist(), plan.network.part.tolist(), strict=True):
        # The one who passes them on is named first.
        readers[part, source, target if by_node else -1] += [target, *sorted(passed_on.get((part, target), []))]
    nodes = plan.rollout.node_numbers()
    found: dict[tuple[_Group, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for (part, source, _), gpus in readers.items():
        gpus = gpus if by_node else sorted(gpus)
        tensor, batch = plan.tensors[plan.parts.tensor[part]], int(plan.parts.batch[part])
        place = int(nodes[gpus[0]]) if tensor.expert is None else gpus[0]
        group = _Group(is_late=tensor.expert is None, batch=batch, stage=tensor.stage, place=place)
        found[group, source, tuple(gpus)].append(part)
    return found


def _entry(plan: TransferPlan, part: int) -> BucketEntry:
    name = plan.tensors[plan.parts.tensor[part]].name
    start, shape = plan.box(part)
    if (stack := stack_of(name)) is not None:
        name, start, shape = stack[0], (stack[1], *start), (1, *shape)
    return BucketEntry(name=name, start=start, shape=shape, offset=0, num_bytes=int(plan.parts.num_bytes[part]))


def _units(plan: TransferPlan, parts: Sequence[int]) -> Iterator[list[BucketEntry]]:
    """Units that may not be separated: a piece, and the scales that follow it."""
    unit: list[BucketEntry] = []
    for part in sorted(parts):
        if unit and not plan.parts.follows[part]:
            yield unit
            unit = []
        unit.append(_entry(plan, part))
    yield unit


def _buckets(units: Sequence[Sequence[BucketEntry]], bucket_bytes: int) -> Iterator[list[BucketEntry]]:
    """As few as there must be, and of about one size, so that those of a round take equally long."""
    full = [end for _, end in _filled(units, bucket_bytes, share=inf)]
    return (_placed(entries) for entries, _ in _filled(units, bucket_bytes, share=sum(full) / len(full)))


def _filled(units: Sequence[Sequence[BucketEntry]], bucket_bytes: int, *, share: float) -> Iterator[tuple[list[BucketEntry], int]]:
    """Each with where it ends. `share`: how many bytes each bucket has on average, if it can."""
    filled: list[BucketEntry] = []
    num_closed = before = end = 0
    for unit in units:
        after = _after(unit, end)
        if filled and (after > bucket_bytes or before + end >= (num_closed + 1) * share):
            yield filled, end
            num_closed, before = num_closed + 1, before + end
            filled, after = [], _after(unit, 0)
        filled += unit
        end = after
    if filled:
        yield filled, end


def _after(unit: Sequence[BucketEntry], end: int) -> int:
    """Where `unit` ends after what ends at `end`."""
    for entry in unit:
        end = _aligned(end) + entry.num_bytes
    return end


def _placed(entries: Sequence[BucketEntry]) -> list[BucketEntry]:
    found, end = [], 0
    for entry in entries:
        found.append(replace(entry, offset=_aligned(end)))
        end = found[-1].offset + entry.num_bytes
    return found


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _end(entries: Sequence[BucketEntry]) -> int:
    return entries[-1].offset + entries[-1].num_bytes


# When each bucket travels: rounds in which every rank sends at most one and every reader receives at most one. Over a network this is a
# coloring of the edges of a bipartite multigraph (trainer ranks, GPUs of the rollout; an edge is a bucket): first fit, by groups that
# belong together. On one host a bucket may have several readers.

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
