"""Weights through files that trainer and servers both see: one per bucket, whole, or with only the blocks that changed since the last push.

    payload: blocks of BLOCK_BYTES of the bucket, end to end | index (JSON) | length and xxh3_128 of the index, magic

A file has its name only when it is complete, and is removed before the second after it is written: two buckets of a sender are on disk.
"""

import json
import os
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash

from moerl.types.errors import WeightError
from moerl.types.push import Bucket
from moerl.weights.plan.spec_tensors import box_of
from moerl.weights.verify.digest import tensor_bytes

BLOCK_BYTES = 2**16
_TRAILER = struct.Struct("<Q16s8s")
_MAGIC = b"MOERLWT1"
DIRECTORY_KEY = "moerl/directory"
"""In the rendezvous of a push: a sender's directory."""
_PRESENCE = "sender"
"""A file by which a receiver knows that it sees the sender's directory."""

Read = Callable[[str], torch.Tensor]
"""Tensor that the model now holds under a checkpoint name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    push: int
    """Counted by the sender from its listen."""
    num_bytes: int
    is_delta: bool
    """Blocks that are absent are those of push - 1."""
    blocks: list[tuple[int, int, int]]
    """(number in the bucket, bytes in the file, xxh3_64 of these bytes), in the order of the file."""


class DiskSender:
    """Remembers a hash of every block of the last push, 8 bytes each, to find those that changed."""

    def __init__(self, directory: Path, *, delta: bool):
        """`directory` is this sender's own: listen empties it."""
        self.directory, self._delta = directory, delta
        self._push = 0
        self._hashes: list[array[int]] = []
        self._last: list[array[int]] = []
        self._written: list[Path] = []

    def listen(self) -> None:
        """The next push is whole."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._empty()
            (self.directory / _PRESENCE).touch()
        except OSError as error:
            raise WeightError(f"weights.transport = disk: {self.directory} cannot be written ({error})") from error
        self._push, self._hashes, self._last = 0, [], []

    def write(self, index: int, data: torch.Tensor) -> tuple[Path, int]:
        """The file of bucket `index`, uint8 `data`, and its size. Index 0 begins a push. All have read the second bucket before it."""
        if index == 0:
            self._push, self._hashes = self._push + 1, []
        path = self.directory / f"push-{self._push:06d}-bucket-{index:05d}"
        base = self._last[index] if index < len(self._last) else None
        partial = path.with_suffix(".partial")
        try:
            self._remove(self._written[:-1])
            with partial.open("wb") as file:
                num_bytes = self._write(file, data.numpy().data, base)
            os.replace(partial, path)
        except OSError as error:
            raise WeightError(f"weights.transport = disk: {path} could not be written ({error})") from error
        self._written = [*self._written[-1:], path]
        return path, num_bytes

    def end(self) -> None:
        """Every bucket of the push was read: the next one may be a delta to it."""
        self._last = self._hashes if self._delta else []
        self._remove(self._written)
        self._written = []

    def close(self) -> None:
        """Safe to call twice."""
        self._empty()
        (self.directory / _PRESENCE).unlink(missing_ok=True)

    def _write(self, file: BinaryIO, data: memoryview, base: "array[int] | None") -> int:
        hashes = array("Q", (xxhash.xxh3_64_intdigest(block) for block in _blocks(data)))
        self._hashes.append(hashes)
        is_delta = base is not None and len(base) == len(hashes)
        blocks = []
        for number, block in enumerate(_blocks(data)):
            if is_delta and base is not None and base[number] == hashes[number]:
                continue
            # Whole weights hardly shrink, and slowly. What is left of a delta is little, and pays for a slow network.
            stored = zlib.compress(block, level=1) if is_delta else block
            file.write(stored)
            blocks.append((number, len(stored), xxhash.xxh3_64_intdigest(stored) if is_delta else hashes[number]))
        index = json.dumps(asdict(_Index(push=self._push, num_bytes=len(data), is_delta=is_delta, blocks=blocks))).encode()
        file.write(index + _TRAILER.pack(len(index), xxhash.xxh3_128_digest(index), _MAGIC))
        return file.tell()

    def _remove(self, files: Sequence[Path]) -> None:
        for file in files:
            file.unlink(missing_ok=True)

    def _empty(self) -> None:
        """Also of what a sender left that was killed."""
        self._remove(list(self.directory.glob("push-*")))
        self._written = []


class DiskReader:
    """The receiver's side. `read` gives the base of a delta: the tensors as the push before left them."""

    def __init__(self, directory: str, *, read: Read | None):
        if not (Path(directory) / _PRESENCE).exists():
            raise WeightError(
                f"weights.transport = disk: this server does not see {directory}; output_dir must lie on a file system that trainer and "
                "servers share, under one path. Otherwise set weights.transport=nccl"
            )
        self._read = read
        self._pushes: dict[int, int] = {}  # by sender, the last that was read
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fetch(self, bucket: Bucket, source: str) -> torch.Tensor:
        """uint8 [bucket.num_bytes] of the file `source`, valid until the next fetch. WeightError names one that is damaged, truncated or
        absent."""
        path = Path(source)
        if bucket.num_bytes > len(self._memory):
            self._memory = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        data = self._memory[: bucket.num_bytes]
        try:
            with path.open("rb") as file:
                index = _read_index(file)
                if index.num_bytes != bucket.num_bytes:
                    raise ValueError(f"it is of a bucket of {index.num_bytes} bytes, not {bucket.num_bytes}")
                if index.is_delta:
                    self._lay_base(bucket, index, data)
                _read_blocks(file, index, data)
        except (OSError, ValueError, zlib.error) as error:
            raise WeightError(f"{path}: {error}; this server refuses it, and the next push will be whole") from error
        self._pushes[bucket.sender] = index.push
        return data

    def close(self) -> None:
        """Safe to call twice."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _lay_base(self, bucket: Bucket, index: _Index, data: torch.Tensor) -> None:
        if self._read is None:
            raise ValueError("it holds changes alone, and this engine does not give back what it holds; set weights.disk_delta=false")
        last = self._pushes.get(bucket.sender, 0)
        if last not in (index.push, index.push - 1):
            raise ValueError(f"it holds what changed since push {index.push - 1}, and the last one read here is {last}")
        for entry in bucket.entries:
            piece = box_of(self._read(entry.name), entry.start, entry.shape)
            data[entry.offset : entry.offset + entry.num_bytes] = tensor_bytes(piece)


def _blocks(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES))


def _read_index(file: BinaryIO) -> _Index:
    size = file.seek(0, os.SEEK_END)
    if size < _TRAILER.size:
        raise ValueError(f"truncated: {size} bytes")
    file.seek(-_TRAILER.size, os.SEEK_END)
    length, digest, magic = _TRAILER.unpack(file.read(_TRAILER.size))
    if magic != _MAGIC or length > size - _TRAILER.size:
        raise ValueError("truncated, or no file of a weight push: it does not end as one")
    file.seek(-_TRAILER.size - length, os.SEEK_END)
    text = file.read(length)
    if xxhash.xxh3_128_digest(text) != digest:
        raise ValueError("damaged: its index has another digest")
    return _Index(**json.loads(text))


def _read_blocks(file: BinaryIO, index: _Index, data: torch.Tensor) -> None:
    file.seek(0)
    into = data.numpy().data
    for number, num_bytes, digest in index.blocks:
        stored = file.read(num_bytes)
        if xxhash.xxh3_64_intdigest(stored) != digest:
            raise ValueError(f"damaged: block {number} has another digest")
        start = number * BLOCK_BYTES
        into[start : start + BLOCK_BYTES] = zlib.decompress(stored) if index.is_delta else stored
