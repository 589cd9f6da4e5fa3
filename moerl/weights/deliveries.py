"""From a plan to what runs: the buckets that every trainer rank will fill, known before any byte moves. Pure.

A bucket has pieces for the same readers, in the order of their tensors' names, but scales next to their values. On one host, what a plan
passes on within a node is read by every GPU of the node where the first of them reads it. Over a network (`relays`) a bucket goes to one
GPU, and from there to others of its node. Every rank sends, and every reader reads, in the order of the schedule's rounds.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moerl.models.stacks import stack_of, stored_name
from moerl.push_types import Bucket, BucketEntry, Manifest, Piece, TensorSpec
from moerl.types import WeightError
from moerl.weights.plan import Plan, PlannedTensor
from moerl.weights.schedule import first_fit

ALIGNMENT = 64
"""Of every piece in a bucket, in bytes: a cache line, and a multiple of every element size."""

Job = tuple[Bucket, ...]
"""What one trainer rank sends in every push."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliveries:
    tensors: tuple[TensorSpec, ...]
    jobs: Mapping[int, Job]
    """By trainer rank; only those that send."""


def deliveries(plan: Plan, *, bucket_bytes: int, relays: bool = False) -> Deliveries:
    """A piece larger than `bucket_bytes` travels alone, or with its scales only."""
    found = [
        (late, Bucket(sender=sender, index=0, num_bytes=_end(entries), entries=tuple(entries), readers=readers))
        for (sender, readers, late), parts in sorted(_by_readers(plan, relays=relays).items())
        for entries in _buckets(_units(plan, parts), bucket_bytes)
    ]
    jobs: dict[int, list[Bucket]] = {}
    for bucket in _in_rounds(found, relays=relays):
        mine = jobs.setdefault(bucket.sender, [])
        mine.append(replace(bucket, index=len(mine)))
    return Deliveries(tensors=stored_specs(plan.tensors), jobs={sender: tuple(buckets) for sender, buckets in jobs.items()})


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


def _in_rounds(buckets: Iterable[tuple[bool, Bucket]], *, relays: bool) -> list[Bucket]:
    """By round, of which every sender and reader is in one bucket; of readers to whom one relays, the first. Buckets of about one size
    share a round, or the small ones would wait for the large. Of one size by name, and experts, which seldom come in pieces, before all
    else: so that a reader soon has all pieces of a tensor, which it keeps until then."""

    def turn(each: tuple[bool, Bucket]) -> tuple[bool, int, str, tuple[int, ...]]:
        late, bucket = each
        return late, -(bucket.num_bytes - 1).bit_length(), bucket.entries[0].name, bucket.entries[0].start

    edges = [bucket for _, bucket in sorted(buckets, key=turn)]
    rounds = first_fit((bucket.sender, bucket.readers[:1] if relays else bucket.readers) for bucket in edges)
    placed = [replace(bucket, round=number) for bucket, number in zip(edges, rounds, strict=True)]
    return sorted(placed, key=lambda bucket: bucket.round)


def _by_readers(plan: Plan, *, relays: bool) -> dict[tuple[int, tuple[int, ...], bool], list[int]]:
    """Parts by sender, all who read them from there, and whether they go late. With `relays` readers are of one node, the first gets
    the parts over the network, and all but experts go late; without, nothing does."""
    passed_on: dict[tuple[int, int], list[int]] = defaultdict(list)
    for relay, target, part in zip(plan.spread.source.tolist(), plan.spread.target.tolist(), plan.spread.part.tolist(), strict=True):
        passed_on[part, relay].append(target)
    found: dict[tuple[int, tuple[int, ...], bool], list[int]] = defaultdict(list)
    readers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for source, target, part in zip(plan.network.source.tolist(), plan.network.target.tolist(), plan.network.part.tolist(), strict=True):
        others = passed_on.get((part, target), [])
        if relays:
            is_expert = plan.tensors[plan.parts.tensor[part]].expert is not None
            found[source, (target, *sorted(others)), not is_expert].append(part)
        else:
            readers[part, source] += [target, *others]
    for (part, source), gpus in readers.items():
        found[source, tuple(sorted(gpus)), False].append(part)
    return found


def _entry(plan: Plan, part: int) -> BucketEntry:
    name = plan.tensors[plan.parts.tensor[part]].name
    start, shape = plan.box(part)
    if (stack := stack_of(name)) is not None:
        name, start, shape = stack[0], (stack[1], *start), (1, *shape)
    return BucketEntry(name=name, start=start, shape=shape, offset=0, num_bytes=int(plan.parts.num_bytes[part]))


def _units(plan: Plan, parts: Sequence[int]) -> Iterator[list[BucketEntry]]:
    """What may not be separated: a piece, and the scales that follow it."""
    unit: list[BucketEntry] = []
    for part in sorted(parts):
        if unit and not plan.parts.follows[part]:
            yield unit
            unit = []
        unit.append(_entry(plan, part))
    yield unit


def _buckets(units: Iterable[Sequence[BucketEntry]], bucket_bytes: int) -> Iterator[list[BucketEntry]]:
    filled: list[BucketEntry] = []
    for unit in units:
        placed = _placed(unit, _end(filled))
        if filled and _end(placed) > bucket_bytes:
            yield filled
            filled, placed = [], _placed(unit, 0)
        filled += placed
    if filled:
        yield filled


def _placed(unit: Sequence[BucketEntry], end: int) -> list[BucketEntry]:
    """After what ends there."""
    found: list[BucketEntry] = []
    for entry in unit:
        found.append(replace(entry, offset=-(-end // ALIGNMENT) * ALIGNMENT))
        end = _end(found)
    return found


def _end(entries: Sequence[BucketEntry]) -> int:
    return entries[-1].offset + entries[-1].num_bytes if entries else 0
