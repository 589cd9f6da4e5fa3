"""From a plan to what runs: the buckets that every trainer rank will fill, known before any byte moves. Pure.

A bucket has pieces of one batch for the same readers (travel_groups.py), in the order of their tensors' names, but scales next to their
values. Over a network (`by_node`) a bucket goes to one GPU, and from there to others of its node; or to a trainer rank of the node, from
which all of them read it (`Bucket.relay`). Every rank sends, and every reader reads, in the order of the schedule's rounds (schedule.py).
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from moerl.models.expert_stacks import stack_of, stored_name
from moerl.types.errors import WeightError
from moerl.types.push import Bucket, BucketEntry, Manifest, Piece, TensorSpec
from moerl.weights.plan.schedule import first_fit
from moerl.weights.plan.transfer_plan import PlannedTensor, Relays, TransferPlan
from moerl.weights.plan.travel_groups import TravelGroup, travel_groups

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
    groups: dict[TravelGroup, list[Bucket]] = defaultdict(list)
    contents, node_of = _Contents(plan, bucket_bytes), plan.rollout.node_numbers().tolist()
    for each in travel_groups(plan, by_node=by_node):
        relay = None if plan.relays is None else _relay(plan.relays, each.sender, each.readers[0], node_of)
        for entries in contents.of(each.parts):
            groups[each.group].append(
                Bucket(sender=each.sender, index=0, num_bytes=_end(entries), entries=entries, readers=each.readers, relay=relay)
            )
    jobs: dict[int, list[Bucket]] = {}
    for number, bucket in _in_rounds(_by_turns(groups, plan.layout.pp), plan.relays, by_node=by_node):
        mine = jobs.setdefault(bucket.sender, [])
        mine.append(replace(bucket, index=len(mine), round=number))
    return Deliveries(tensors=stored_specs(plan.tensors), jobs={sender: tuple(buckets) for sender, buckets in jobs.items()})


def relayed(jobs: Mapping[int, Job]) -> dict[int, Job]:
    """By trainer rank the buckets that it gets from others for the readers of its node, in order; only those that get some. Without
    entries, which a relay has no use for."""
    found: dict[int, list[Bucket]] = defaultdict(list)
    for bucket in in_order(jobs):
        if bucket.lender != bucket.sender:
            found[bucket.lender].append(replace(bucket, entries=()))
    return {rank: tuple(buckets) for rank, buckets in found.items()}


def restricted(found: Deliveries, readers: Mapping[int, int]) -> Deliveries:
    """The same without readers that are not there. `readers`: numbers of those that are, and what they are called from now on."""
    jobs: dict[int, Job] = {}
    for sender, job in found.jobs.items():
        left = ((bucket, tuple(readers[reader] for reader in bucket.readers if reader in readers)) for bucket in job)
        kept = [replace(bucket, index=index, readers=some) for index, (bucket, some) in enumerate(each for each in left if each[1])]
        if kept:
            jobs[sender] = tuple(kept)
    return replace(found, jobs=jobs)


def pieces_of(job: Job) -> list[BucketEntry]:
    """Entries of a job, each piece once, also if it goes to several places; in the order in which they first come."""
    found: dict[tuple[str, tuple[int, ...]], BucketEntry] = {}
    for entries in {id(bucket.entries): bucket.entries for bucket in job}.values():
        for entry in entries:
            found.setdefault((entry.name, entry.start), entry)
    return list(found.values())


def in_order(jobs: Mapping[int, Job]) -> list[Bucket]:
    """All buckets in the one order that every rank and every reader keeps to, whatever it has of them: so that none waits for one that
    waits for it."""
    return list(heapq.merge(*jobs.values(), key=lambda bucket: (bucket.round, bucket.sender)))


def manifest_of(found: Deliveries, digests: Mapping[int, Sequence[str]], *, version: int) -> Manifest:
    """`digests`: by trainer rank, of the pieces of its job (`pieces_of`). WeightError if ranks that hold the same do not agree."""
    held: dict[tuple[str, tuple[int, ...]], tuple[BucketEntry, str, list[int]]] = {}
    for sender, job in found.jobs.items():
        for entry, digest in zip(pieces_of(job), digests[sender], strict=True):
            _, other, ranks = held.setdefault((entry.name, entry.start), (entry, digest, [sender]))
            if other != digest:
                raise WeightError(
                    f"tensor {entry.name!r} at {list(entry.start)}: trainer ranks {ranks[0]} and {sender} hold copies of it, "
                    "and their bytes differ: the trainer's replicas have diverged; resume from a checkpoint"
                )
            if ranks[-1] != sender:  # the first one has begun the list
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


def _by_turns(groups: Mapping[TravelGroup, Sequence[Bucket]], num_stages: int) -> list[Sequence[Bucket]]:
    """Batch by batch. Places that the same rank serves begin with different stages, so that all stages have something to do."""
    num_served = Counter[tuple[bool, int, int]]()
    turns: dict[TravelGroup, int] = {}
    for group in sorted(groups):
        served = group.is_late, group.batch, min(bucket.sender for bucket in groups[group])
        turns[group] = (group.stage + num_served[served]) % num_stages
        num_served[served] += 1
    order = sorted(groups, key=lambda group: (group.is_late, group.batch, turns[group], group.place))
    return [groups[group] for group in order]


def _relay(relays: Relays, sender: int, reader: int, node_of: Sequence[int]) -> int:
    """Rank on the reader's node that lends it what the sender has."""
    return sender if relays.node_of_rank[sender] == node_of[reader] else relays.of_gpu[reader]


def _in_rounds(groups: Sequence[Sequence[Bucket]], relays: Relays | None, *, by_node: bool) -> list[tuple[int, Bucket]]:
    """By round, of which every sender, and every relay or reader, is in one bucket; of readers of a node, the first. What a node's own rank
    lends keeps the relay of its first reader from others too: rounds that are equally full have equally long transfers."""
    edges = [[(bucket.sender, _targets(bucket, relays, by_node=by_node)) for bucket in group] for group in groups]
    placed = [each for rounds, group in zip(first_fit(edges), groups, strict=True) for each in zip(rounds, group, strict=True)]
    return sorted(placed, key=lambda each: each[0])


def _targets(bucket: Bucket, relays: Relays | None, *, by_node: bool) -> Sequence[int]:
    if relays is not None:
        return (relays.of_gpu[bucket.readers[0]],)
    return bucket.readers[:1] if by_node else bucket.readers


class _Contents:
    """Buckets' entries. What goes to several places is put into buckets once, and the entries are shared."""

    def __init__(self, plan: TransferPlan, bucket_bytes: int):
        self._bucket_bytes, self._boxes = bucket_bytes, list(plan.boxes())
        self._sizes, self._follows = plan.parts.num_bytes.tolist(), plan.parts.follows.tolist()
        self._known: dict[bytes, list[tuple[BucketEntry, ...]]] = {}

    def of(self, parts: np.ndarray) -> list[tuple[BucketEntry, ...]]:
        """`parts`: ascending. As few buckets as there must be, and of about one size, so that those of a round take equally long."""
        key = parts.tobytes()
        if key not in self._known:
            units = list(self._units(parts.tolist()))
            full = [end for _, end in self._filled(units, share=inf)]
            filled = self._filled(units, share=sum(full) / len(full))
            self._known[key] = [tuple(self._placed(members)) for members, _ in filled]
        return self._known[key]

    def _units(self, parts: Sequence[int]) -> Iterator[list[int]]:
        """Units that may not be separated: a piece, and the scales that follow it."""
        unit: list[int] = []
        for part in parts:
            if unit and not self._follows[part]:
                yield unit
                unit = []
            unit.append(part)
        yield unit

    def _filled(self, units: Sequence[Sequence[int]], *, share: float) -> Iterator[tuple[list[int], int]]:
        """Parts of a bucket, and where they end. `share`: how many bytes each bucket has on average, if it can."""
        filled: list[int] = []
        num_closed = before = end = 0
        for unit in units:
            after = self._after(unit, end)
            if filled and (after > self._bucket_bytes or before + end >= (num_closed + 1) * share):
                yield filled, end
                num_closed, before = num_closed + 1, before + end
                filled, after = [], self._after(unit, 0)
            filled += unit
            end = after
        if filled:
            yield filled, end

    def _after(self, unit: Sequence[int], end: int) -> int:
        """Where `unit` ends after what ends at `end`."""
        for part in unit:
            end = _aligned(end) + self._sizes[part]
        return end

    def _placed(self, parts: Sequence[int]) -> Iterator[BucketEntry]:
        end = 0
        for part in parts:
            offset, (tensor, start, shape) = _aligned(end), self._boxes[part]
            name = tensor.name
            if (stack := stack_of(name)) is not None:
                name, start, shape = stack[0], (stack[1], *start), (1, *shape)
            end = offset + self._sizes[part]
            yield BucketEntry(name=name, start=start, shape=shape, offset=offset, num_bytes=self._sizes[part])


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _end(entries: Sequence[BucketEntry]) -> int:
    return entries[-1].offset + entries[-1].num_bytes
