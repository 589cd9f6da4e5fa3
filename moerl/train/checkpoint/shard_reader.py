"""Files of a checkpoint read once by all ranks together: each by one of them, from end to end, and its digest made of the same bytes.

What another rank needs of an item goes to it over gloo as soon as the item is read. So a file system gives every byte once, whatever
the layout, replicas of a weight too; and nothing waits for digests. All ranks take the items in one order, by turn and then by reader, of
which each leaves out what does not concern it: the first exchange in that order that has not ended has both sides at it, so none waits
for ever. A rank has one item in memory at a time, twice: as bytes and as the tensor they become, or that and what is sent of it.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from moerl.train.checkpoint.boxes import Box
from moerl.train.checkpoint.checkpoint_dirs import FileDigests
from moerl.train.checkpoint.checkpoint_pickles import load_tensor, why_refused
from moerl.train.checkpoint.stored_items import Contents, Item, Need, as_rows, boxes_by_item, slices
from moerl.types.errors import CheckpointError

_CHUNK_BYTES = 2**20


@dataclass(slots=True)
class Found:
    """Outcome of reading, besides tensors that are filled."""

    objects: dict[str, Any] = field(default_factory=dict)
    """By key."""
    damaged: list[str] = field(default_factory=list)
    """Files whose bytes are not those that were written; nothing that was read may then be used."""
    refused: list[str] = field(default_factory=list)
    """Why items of files that are as they were written cannot be read."""


def read_shards(directory: Path, contents: Contents, needs: Sequence[Need] | CheckpointError, files: FileDigests) -> Found:
    """Collective. Fills the targets of `needs`, and finds what is damaged in the files of all ranks, which all ranks are told.

    `files`: digests that they should have. Raises CheckpointError on all ranks: the one given as `needs` on any of them, or of
    undamaged files that hold something else than the index says.
    """
    asked = _gathered(str(needs) if isinstance(needs, CheckpointError) else as_rows(needs))
    if impossible := [each for each in asked if isinstance(each, str)]:
        raise CheckpointError(impossible[0])
    assert not isinstance(needs, CheckpointError), "else it was raised"
    mine = [number for name, numbers in contents.files.items() if contents.readers[name] == dist.get_rank() for number in numbers]
    wanted = [boxes_by_item(rows, mine) for rows in asked]
    del asked
    found = Found()
    _exchange(contents, needs, wanted, _read_items(directory, contents, files, found), found)
    every = _gathered((found.damaged, found.refused))
    found.damaged = [name for damaged, _ in every for name in damaged]
    found.refused = [reason for _, refused in every for reason in refused]
    if found.refused and not found.damaged:
        raise CheckpointError(found.refused[0])
    return found


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _exchange(
    contents: Contents, needs: Sequence[Need], wanted: Sequence[Mapping[int, tuple[Box, ...]]], read: Iterator[Tensor], found: Found
) -> None:
    """`wanted`: by rank, what it needs of the items that this one reads. `read`: those items."""
    rank, items = dist.get_rank(), contents.items
    own: dict[int, list[Need]] = {}
    for need in needs:
        own.setdefault(need.item, []).append(need)
    numbers = {number for name, numbers in contents.files.items() if contents.readers[name] == rank for number in numbers} | own.keys()
    for number in sorted(numbers, key=lambda number: (items[number].turn, items[number].reader)):
        item, here = items[number], own.get(number, [])
        if item.reader == rank:
            tensor = next(read)
            sending = _send(tensor, {other: boxes[number] for other, boxes in enumerate(wanted) if number in boxes and other != rank})
            _take(item, here, [tensor[slices(need.box)] for need in here], found)
            for work in sending:
                work.wait()
        else:
            _take(item, here, _receive(item, here), found)
    for _ in read:
        raise AssertionError("every item of the files was taken")


def _send(tensor: Tensor, wanted: Mapping[int, tuple[Box, ...]]) -> list[Any]:
    """Begin to send each rank its boxes end to end; ranks that need the same get the same copy."""
    packed = {boxes: _packed([tensor[slices(box)] for box in boxes]) for boxes in set(wanted.values())}
    return [dist.isend(packed[boxes], rank) for rank, boxes in wanted.items()]


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """uint8, end to end: no backend then asks for the dtype."""
    flat = parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
    return flat.contiguous().view(torch.uint8)


def _receive(item: Item, needs: Sequence[Need]) -> list[Tensor]:
    dtype = torch.uint8 if item.dtype is None else item.dtype
    counts = [torch.Size(need.box.shape).numel() for need in needs]
    flat = torch.empty(sum(counts), dtype=dtype)
    dist.recv(flat.view(torch.uint8), item.reader)
    return [part.view(need.box.shape) for part, need in zip(flat.split(counts), needs, strict=True)]


def _take(item: Item, needs: Sequence[Need], parts: Iterable[Tensor], found: Found) -> None:
    for need, part in zip(needs, parts, strict=True):
        if need.target is not None:
            need.target.copy_(part)
        elif item.key not in found.objects:
            try:
                # Megatron and torch write an object as a list of one.
                (found.objects[item.key],) = torch.load(io.BytesIO(part.numpy().tobytes()), map_location="cpu", weights_only=True)
            except Exception as error:  # torch's own, of bytes that it has never written
                found.refused.append(f"{item.key}: {why_refused(error)}")


# -- files -----------------------------------------------------------------------------------------------------


def _read_items(directory: Path, contents: Contents, files: FileDigests, found: Found) -> Iterator[Tensor]:
    """Items of this rank's files in order; an object as uint8. Adds files that are not as they were written to `found`."""
    for name, numbers in contents.files.items():
        if contents.readers[name] == dist.get_rank():
            yield from _read_file(directory / name, [contents.items[number] for number in numbers], name, files[name], found)


def _read_file(path: Path, items: Sequence[Item], name: str, written: tuple[int, str], found: Found) -> Iterator[Tensor]:
    digest, refused = xxhash.xxh3_128(), []
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        for item in items:
            _copy(file, item.begin - file.tell(), buffer, digest)
            try:
                tensor = _tensor(item, _item_bytes(file, item, buffer, digest))
            except CheckpointError as error:
                refused.append(f"{name}: {item.key}: {error}")
                tensor = torch.zeros(item.box.shape, dtype=torch.uint8 if item.dtype is None else item.dtype)  # others wait for it
            yield tensor
            del tensor
        _copy(file, None, buffer, digest)
        if (file.tell(), digest.hexdigest()) != written:
            found.damaged.append(name)
        else:
            found.refused += refused


def _copy(file: Any, num_bytes: int | None, buffer: memoryview, digest: Any, into: io.BytesIO | None = None) -> None:
    """Read and digest the next bytes, fewer at the end of the file; None: until there. Without `into` they belong to no item."""
    left = len(buffer) if num_bytes is None else num_bytes
    while left and (count := file.readinto(buffer[: min(left, len(buffer))])):
        digest.update(buffer[:count])
        if into is not None:
            into.write(buffer[:count])
        left -= 0 if num_bytes is None else count


def _item_bytes(file: Any, item: Item, buffer: memoryview, digest: Any) -> io.BytesIO:
    data = io.BytesIO()
    if item.length:  # all of its memory at once, not by and by
        data.seek(item.length - 1)
        data.write(b"\0")
        data.seek(0)
    _copy(file, item.length, buffer, digest, into=data)
    return data


def _tensor(item: Item, data: io.BytesIO) -> Tensor:
    """Raises CheckpointError if the bytes are not those of a tensor as the index says."""
    if item.dtype is None:
        return torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8) if item.length else torch.empty(0, dtype=torch.uint8)
    return load_tensor(data, item.box.shape, item.dtype)
