"""Items of a checkpoint: what lies where in the files of a checkpoint, who reads it, and which parts of it a rank needs. Pure functions.

file        read from its first byte to its last by one rank, whose digest is then that of the whole file
item        what torch.save wrote in one place of a file: a box of a tensor, or an object
need        part of an item that a rank copies into a tensor of its own; of an object all of it
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp

from moerl.train.checkpoint.boxes import Box
from moerl.types.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    key: str
    begin: int
    length: int
    box: Box
    """Place in the tensor `key`; of an object its bytes."""
    dtype: torch.dtype | None
    """None: an object."""
    reader: int
    """Rank that reads the file."""
    turn: int
    """How many items that rank reads before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Every file of a checkpoint but those that all ranks need."""

    files: Mapping[str, range]
    """By name: numbers of its items, in the order in which they lie there."""
    items: Sequence[Item]
    readers: Mapping[str, int]
    """Rank that reads a file."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of whole tensors."""
    numbers: Mapping[str, Sequence[int]]
    """Numbers of the items of a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    item: int
    box: Box
    """Part of the item, counted from the item's own first element; of an object its bytes."""
    target: Tensor | None
    """View of the shape of the box; None: an object, which is kept as it is."""


def contents_of(index: dcp.Metadata, names: Iterable[str], num_ranks: int) -> Contents:
    """`names`: of the files. File i of n is read by rank i * num_ranks // n: as many ranks as wrote them read what each has written.

    Raises CheckpointError where two items share bytes, or one is stored in another file.
    """
    ordered = sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])
    readers = {name: place * num_ranks // len(ordered) for place, name in enumerate(ordered)}
    found: dict[str, list[tuple[int, int, dcp.MetadataIndex]]] = {name: [] for name in ordered}
    for key, place in index.storage_data.items():
        if place.relative_path not in found:
            raise CheckpointError(f"{key.fqn} lies in {place.relative_path}, which is no file of shards")
        found[place.relative_path].append((place.offset, place.length, key))
    tensors = {name: held for name, held in index.state_dict_metadata.items() if isinstance(held, dcp.TensorStorageMetadata)}
    boxes = {(name, tuple(chunk.offsets)): chunk for name, held in tensors.items() for chunk in held.chunks}
    items: list[Item] = []
    files, turns, numbers = {}, [0] * num_ranks, defaultdict(list)
    for name, places in found.items():
        first, end, reader = len(items), 0, readers[name]
        for begin, length, key in sorted(places, key=lambda place: place[:2]):
            if begin < end:
                raise CheckpointError(f"{key.fqn} shares bytes of {name} with another part of the checkpoint")
            end = begin + length
            box, dtype = Box(offset=(0,), shape=(length,)), None
            if key.offset is not None or key.fqn in tensors:
                box, dtype = _tensor_item(tensors, boxes, key)
            numbers[key.fqn].append(len(items))
            items.append(Item(key=key.fqn, begin=begin, length=length, box=box, dtype=dtype, reader=reader, turn=turns[reader]))
            turns[reader] += 1
        files[name] = range(first, len(items))
    shapes = {name: tuple(held.size) for name, held in tensors.items()}
    return Contents(files=files, items=items, readers=readers, shapes=shapes, numbers=numbers)


def _tensor_item(
    tensors: Mapping[str, dcp.TensorStorageMetadata], boxes: Mapping[Any, dcp.ChunkStorageMetadata], key: dcp.MetadataIndex
) -> tuple[Box, torch.dtype]:
    chunk = boxes.get((key.fqn, tuple(key.offset or ())))
    if chunk is None:
        raise CheckpointError(f"a part of {key.fqn} is stored that the tensor has not")
    return Box(offset=tuple(chunk.offsets), shape=tuple(chunk.sizes)), tensors[key.fqn].properties.dtype


def needs_of(contents: Contents, wanted: Iterable[ShardedTensor | ShardedObject]) -> list[Need]:
    """Needs that fill the tensors of `wanted`, and its objects. Raises CheckpointError where the checkpoint has not all of it."""
    return [need for each in wanted for need in (_of_tensor if isinstance(each, ShardedTensor) else _of_object)(contents, each)]


def _of_object(contents: Contents, wanted: ShardedObject) -> list[Need]:
    numbers = contents.numbers.get(wanted.unique_key, [])
    if len(numbers) != 1 or contents.items[numbers[0]].dtype is not None:
        raise CheckpointError(f"it has no object {wanted.unique_key}")
    return [Need(item=numbers[0], box=contents.items[numbers[0]].box, target=None)]


def _of_tensor(contents: Contents, wanted: ShardedTensor) -> list[Need]:
    shape = contents.shapes.get(wanted.key)
    if shape is None:
        raise CheckpointError(f"it has no tensor {wanted.key}")
    if shape != tuple(wanted.global_shape) and not wanted.allow_shape_mismatch:
        raise CheckpointError(f"its {wanted.key} has the shape {shape}, this model's {tuple(wanted.global_shape)}")
    leading = (1,) * wanted.prepend_axis_num
    target = wanted.data.detach().view(leading + tuple(wanted.local_shape)) if leading else wanted.data.detach()
    box = Box(offset=tuple(wanted.global_offset), shape=tuple(target.shape))
    needs = []
    for number in contents.numbers[wanted.key]:
        stored = contents.items[number].box
        if (common := _common(stored, box)) is not None:
            needs.append(Need(item=number, box=_inside(common, stored), target=target[slices(_inside(common, box))]))
    if not wanted.allow_shape_mismatch and sum(prod(need.box.shape) for need in needs) != prod(box.shape):
        raise CheckpointError(f"it has not all of {wanted.key}")
    return needs


def _common(a: Box, b: Box) -> Box | None:
    """None without an element in common."""
    begins = [max(pair) for pair in zip(a.offset, b.offset, strict=True)]
    ends = [min(x + n, y + m) for x, n, y, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True)]
    if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
        return None
    return Box(offset=tuple(begins), shape=tuple(end - begin for begin, end in zip(begins, ends, strict=True)))


def _inside(box: Box, outer: Box) -> Box:
    """The same, counted from the first element of `outer`."""
    return Box(offset=tuple(a - b for a, b in zip(box.offset, outer.offset, strict=True)), shape=box.shape)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(box.offset, box.shape, strict=True))


# -- needs as numbers, which ranks tell each other -------------------------------------------------------------


def as_rows(needs: Sequence[Need]) -> np.ndarray:
    """int64 [N, 2 + 2 D]: item, axes, offset, shape; D is the most axes of any."""
    most = max((len(need.box.shape) for need in needs), default=0)
    rows = np.zeros((len(needs), 2 + 2 * most), dtype=np.int64)
    for row, need in zip(rows, needs, strict=True):
        axes = len(need.box.shape)
        row[:2], row[2 : 2 + axes], row[2 + most : 2 + most + axes] = (need.item, axes), need.box.offset, need.box.shape
    return rows


def boxes_by_item(rows: np.ndarray, items: Iterable[int]) -> dict[int, tuple[Box, ...]]:
    """Those of the needs of these items, in their order."""
    most, found = (rows.shape[1] - 2) // 2, defaultdict(list)
    for number, axes, *rest in rows[np.isin(rows[:, 0], list(items))].tolist():
        found[number].append(Box(offset=tuple(rest[:axes]), shape=tuple(rest[most : most + axes])))
    return {number: tuple(boxes) for number, boxes in found.items()}
