"""Groups of what travels together in a push: parts of one batch that one rank sends to the same readers. Pure, and by columns: large models
have a million transfers.

On one host, what a plan passes on within a node is read by every GPU of it where the first of them reads it. Over a network (`by_node`)
readers are of one node.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moerl.weights.plan.transfer_plan import TransferPlan


class TravelGroup(NamedTuple):
    """Key of buckets that should come together: a batch, where it is read."""

    is_late: bool
    """Experts, which go to fewer readers, go before all else."""
    batch: int
    stage: int
    place: int
    """The first of the readers of experts; the node of all else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Parts of one batch from one rank to the same readers."""

    group: TravelGroup
    sender: int
    readers: tuple[int, ...]
    """The first gets them over the network, with `by_node`; else in order."""
    parts: np.ndarray  # int32, ascending


def travel_groups(plan: TransferPlan, *, by_node: bool) -> Iterator[Together]:
    """By group, sender and readers."""
    rows, parts, sets = _rows(plan, by_node=by_node)
    for (late, batch, stage, place, sender, readers), some in zip(rows, parts, strict=True):
        yield Together(group=TravelGroup(bool(late), batch, stage, place), sender=sender, readers=sets[readers], parts=some)


def _rows(plan: TransferPlan, *, by_node: bool) -> tuple[list[list[int]], list[np.ndarray], list[tuple[int, ...]]]:
    """Numbers of each group with its sender and the number of its set of readers, in order; the parts of each; and the sets."""
    units, sets = _units(plan, by_node=by_node)
    part, sender, readers = units
    is_other = np.array([tensor.expert is None for tensor in plan.tensors])
    tensor, first = plan.parts.tensor[part], np.array([found[0] for found in sets], dtype=np.int32)[readers]
    is_late = is_other[tensor]
    stage = np.array([each.stage for each in plan.tensors], dtype=np.int32)[tensor]
    place = np.where(is_late, plan.rollout.node_numbers().astype(np.int32)[first], first)
    columns = (is_late.astype(np.int32), plan.parts.batch[part], stage, place, sender, readers)
    shape = tuple(int(column.max(initial=0)) + 1 for column in columns)
    key = np.ravel_multi_index(columns, shape)  # one number of six, to sort by
    order = np.lexsort((part, key))
    key, part = key[order], part[order]
    begins = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    return np.stack(np.unravel_index(key[begins], shape), axis=1).tolist(), np.split(part, begins[1:]), sets


_Units = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Columns: part, sender, number of the set of its readers."""


def _units(plan: TransferPlan, *, by_node: bool) -> tuple[_Units, list[tuple[int, ...]]]:
    """A unit is a part from one rank to all who read it there; and the sets of readers, in order."""
    network = plan.network
    rows: np.ndarray = np.arange(len(network), dtype=np.int32)
    row = rows  # that stand for a unit, and the unit of each
    if not by_node:
        key = network.part.astype(np.int64) * plan.layout.ranks + network.source
        _, rows, row = np.unique(key, return_index=True, return_inverse=True)
    unit = np.concatenate([row, row[_arrivals(plan)]])
    gpu = np.concatenate([network.target, plan.spread.target])
    is_second = by_node & (np.arange(len(unit)) >= len(network))  # who passes it on is named first
    order = np.lexsort((gpu, is_second, unit))
    unit, gpu = unit[order], gpu[order]
    numbers, sets = _numbered(gpu, np.flatnonzero(np.concatenate([[True], unit[1:] != unit[:-1]])))
    return (network.part[rows], network.source[rows], numbers), sets


def _arrivals(plan: TransferPlan) -> np.ndarray:
    """int [spread]: the transfer over the network by which what is passed on has come."""
    num_parts = len(plan.parts.tensor)
    came = plan.network.target.astype(np.int64) * num_parts + plan.network.part
    order = np.argsort(came)
    return order[np.searchsorted(came[order], plan.spread.source.astype(np.int64) * num_parts + plan.spread.part)]


def _numbered(gpus: np.ndarray, begins: np.ndarray) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Number of every set of readers, and the sets in order. Sets lie end to end in `gpus`."""
    ends = np.append(begins[1:], len(gpus))
    found = {gpu.tobytes(): number for number, gpu in enumerate(np.arange(gpus.max() + 1, dtype=gpus.dtype))}
    numbers = gpus[begins].copy()  # right where there is one reader
    memory, size, several = gpus.tobytes(), gpus.itemsize, np.flatnonzero(ends - begins > 1)
    for index, begin, end in zip(several.tolist(), (begins[several] * size).tolist(), (ends[several] * size).tolist(), strict=True):
        numbers[index] = found.setdefault(memory[begin:end], len(found))
    sets = [tuple(np.frombuffer(each, dtype=gpus.dtype).tolist()) for each in found]
    in_order = sorted(range(len(sets)), key=sets.__getitem__)
    rank = np.empty(len(sets), dtype=np.int32)
    rank[in_order] = np.arange(len(sets))  # not as wide as Python's: of millions of transfers each column counts
    return rank[numbers], [sets[number] for number in in_order]
