"""The trainer's side of a weight push: packs a stream of tensors into buckets and offers them. Blocking; runs in trainer rank 0.

One buffer is reused for all buckets, so a bucket must be installed everywhere before the next one is packed.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from moerl.push_types import Bucket, BucketEntry, Origin, Transport
from moerl.types import WeightError
from moerl.weights.digest import tensor_digest
from moerl.weights.disk import DiskSender
from moerl.weights.gloo import TRANSFER_SECONDS, GlooSender
from moerl.weights.shm import SharedBuffer
from moerl.weights.spec import num_bytes, spec_of, view_as

ALIGNMENT = 64
"""Of every tensor in a bucket, in bytes: a cache line, and a multiple of every element size."""

NamedTensor = tuple[str, torch.Tensor]
_UNKNOWN: Mapping[str, Origin] = MappingProxyType({})


class WeightSender:
    """Order of calls: listen, connect, then per push and bucket pack, transmit. After an error start again at listen."""

    def __init__(
        self,
        transport: Transport,
        *,
        bucket_bytes: int,
        host: str = "127.0.0.1",
        timeout_seconds: float = TRANSFER_SECONDS,
        directory: Path | None = None,
        delta: bool = False,
    ):
        """`host` is the address at which receivers reach this process (gloo). `directory`, which is this sender's alone, is where its files
        lie; `delta`: they hold only what changed (disk)."""
        self._bucket_bytes = bucket_bytes
        self._buffer = SharedBuffer(bucket_bytes)
        self._gloo = GlooSender(host=host, timeout_seconds=timeout_seconds) if transport == "gloo" else None
        self._disk: DiskSender | None = None
        if transport == "disk":
            if directory is None:
                raise WeightError("weights.transport = disk: the sender needs a directory for its files")
            self._disk = DiskSender(directory, delta=delta)
        self._held: NamedTensor | None = None

    def listen(self, num_receivers: int) -> str:
        """The address for TransportOffer: host:port (gloo), the directory (disk), empty (shm)."""
        if self._disk is not None:
            return self._disk.listen()
        return "" if self._gloo is None else self._gloo.listen(num_receivers)

    def connect(self) -> None:
        """gloo: returns when all receivers have joined; WeightError at the timeout."""
        if self._gloo is not None:
            self._gloo.connect()

    def pack(self, index: int, tensors: Iterator[NamedTensor], *, origins: Mapping[str, Origin] = _UNKNOWN) -> Bucket | None:
        """Bucket `index` of a push, filled with the next of `tensors`; None when nothing is left.

        Pass the same iterator until None. A tensor that does not fit any more opens the next bucket; one larger than a bucket travels
        alone. Index 0 begins a push: what an aborted one held back is forgotten. What `origins` lacks is digested here.
        """
        if index == 0:
            self._held = None
        entries: list[BucketEntry] = []
        used = 0
        while (item := self._take(tensors)) is not None:
            entry = self._place(item, used, origins) if not entries or self._fits(item, used) else None
            if entry is None:
                self._held = item
                break
            entries.append(entry)
            used = entry.offset + entry.num_bytes
        if not entries:
            if self._disk is not None:
                self._disk.end()
            return None
        source, num_written = self._offer(index, used)
        return Bucket(index=index, num_bytes=used, entries=tuple(entries), source=source, num_written=num_written)

    def transmit(self, bucket: Bucket) -> None:
        """gloo: broadcast the packed bytes while every receiver installs. shm, disk: the receivers read them where they are."""
        if self._gloo is not None:
            self._gloo.send(self._buffer.reserve(bucket.num_bytes)[: bucket.num_bytes])

    def close(self) -> None:
        """Safe to call twice."""
        self._held = None
        self._buffer.close()
        if self._gloo is not None:
            self._gloo.close()
        if self._disk is not None:
            self._disk.close()

    def _offer(self, index: int, num_bytes: int) -> tuple[str, int]:
        """Where receivers find the packed bytes, and how many of them were written to a file."""
        if self._disk is not None:
            path, num_written = self._disk.write(index, self._buffer.reserve(num_bytes)[:num_bytes])
            return str(path), num_written
        return (self._buffer.source if self._gloo is None else ""), 0

    def _take(self, tensors: Iterator[NamedTensor]) -> NamedTensor | None:
        held, self._held = self._held, None
        return held if held is not None else next(tensors, None)

    def _fits(self, item: NamedTensor, used: int) -> bool:
        return _aligned(used) + num_bytes(spec_of(*item)) <= self._bucket_bytes

    def _place(self, item: NamedTensor, used: int, origins: Mapping[str, Origin]) -> BucketEntry:
        """Copy behind the first `used` bytes. A digest made here is of the copy: no second transfer from a GPU."""
        name, tensor = item
        spec, offset = spec_of(*item), _aligned(used)
        size = num_bytes(spec)
        data = self._buffer.reserve(offset + size)[offset : offset + size]
        view_as(data, spec).copy_(tensor.detach())
        digest = origins[name].digest if name in origins else tensor_digest(data)
        return BucketEntry(name=name, offset=offset, num_bytes=size, digest=digest)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
