"""One trainer rank's side of a weight push: it fills its own buckets from what it holds, and offers them. Blocking, and never collective.

Two buffers take turns: one is filled while the other is read. So bucket n may be packed when bucket n - 2 is installed everywhere.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from moerl.push_types import Bucket, BucketEntry, Transport
from moerl.types import WeightError
from moerl.weights.cuda import finished
from moerl.weights.deliveries import Job
from moerl.weights.digest import tensor_digest
from moerl.weights.disk import DiskSender
from moerl.weights.network import TRANSFER_SECONDS, NetworkSender
from moerl.weights.shm import new_buffer
from moerl.weights.spec import CPU

NUM_BUFFERS = 2

ReadPiece = Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor]
"""(name, start, shape): that box of the tensor, in the dtype in which it travels; possibly a view of a parameter."""


class WeightSender:
    """Order of calls: listen, connect, then per push digests, pack, pack, ..., finish. After an error start again at listen."""

    def __init__(
        self,
        transport: Transport,
        job: Job,
        read: ReadPiece,
        *,
        device: torch.device = CPU,
        host: str = "127.0.0.1",
        timeout_seconds: float = TRANSFER_SECONDS,
        directory: Path | None = None,
        delta: bool = False,
    ):
        """`device` is where the tensors are, and buckets stay; files are written from host memory (disk). `host` is the address at which
        others reach this process (nccl). `directory`, which is this sender's alone, is where its files lie; `delta`: they hold only what
        changed (disk)."""
        self._job, self._read = job, read
        self._device = CPU if transport == "disk" else device
        self._buffers = [new_buffer(self._device) for _ in range(NUM_BUFFERS)]
        self._network = NetworkSender(host=host, device=device, timeout_seconds=timeout_seconds) if transport == "nccl" else None
        self._disk: DiskSender | None = None
        if transport == "disk":
            if directory is None:
                raise WeightError("weights.transport = disk: the sender needs a directory for its files")
            self._disk = DiskSender(directory, delta=delta)

    def listen(self, *, is_first: bool) -> str:
        """The first sender's is the address for TransportOffer: host:port of a new store (nccl), its directory (disk), empty (ipc)."""
        if self._disk is not None:
            return self._disk.listen()
        return self._network.listen() if self._network is not None and is_first else ""

    def connect(self, address: str, *, rank: int, world_size: int, num_senders: int) -> None:
        """nccl: returns when all senders and readers have joined, which are ranks in this order; WeightError at the timeout."""
        if self._network is not None:
            self._network.connect(address, rank=rank, world_size=world_size, num_senders=num_senders)

    def digests(self) -> list[str]:
        """Of every entry of the job, made from what is held, not from what is packed; once of what goes to several nodes."""
        found: dict[tuple[str, tuple[int, ...]], str] = {}
        entries = [entry for bucket in self._job for entry in bucket.entries]
        for entry in entries:
            if (entry.name, entry.start) not in found:
                found[entry.name, entry.start] = tensor_digest(self._read(entry.name, entry.start, entry.shape))
        return [found[entry.name, entry.start] for entry in entries]

    def pack(self, index: int) -> Bucket:
        """Fill bucket `index`, and say where its readers find it. nccl: it is on its way when this returns."""
        bucket, buffer = self._job[index], self._buffers[index % NUM_BUFFERS]
        if self._network is not None:
            self._network.wait(index % NUM_BUFFERS)
        data = buffer.reserve(bucket.num_bytes)[: bucket.num_bytes]
        for entry in bucket.entries:
            self._place(entry, data)
        finished(self._device)
        if self._disk is not None:
            path, num_written = self._disk.write(index, data)
            return replace(bucket, source=str(path), num_written=num_written)
        if self._network is None:
            return replace(bucket, source=buffer.source)
        self._network.send(data, bucket, slot=index % NUM_BUFFERS)
        return replace(bucket, source=str(self._network.rank))

    def finish(self) -> None:
        """Every bucket of the push was installed everywhere."""
        if self._disk is not None:
            self._disk.end()

    def close(self) -> None:
        """Safe to call twice."""
        if self._network is not None:
            self._network.close()
        if self._disk is not None:
            self._disk.close()
        for buffer in self._buffers:
            buffer.close()

    def _place(self, entry: BucketEntry, data: torch.Tensor) -> None:
        piece = self._read(entry.name, entry.start, entry.shape).detach()
        if piece.nbytes != entry.num_bytes:
            raise WeightError(
                f"tensor {entry.name!r}: this rank holds {piece.nbytes} bytes of it at {list(entry.start)}, where the plan of the push has "
                f"{entry.num_bytes}; the plan was made for another layout"
            )
        data[entry.offset : entry.offset + entry.num_bytes].view(piece.dtype).view(piece.shape).copy_(piece)
