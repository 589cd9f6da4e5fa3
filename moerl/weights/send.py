"""One trainer rank's side of a weight push: it fills its own buckets from what it holds, and readers get them. Blocking, and never
collective.

Two buffers take turns: one is filled while the other is read. So bucket n is filled when bucket n - 2 is installed by all its readers, or,
over a network, has been sent.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from moerl.cluster.run_secret import RunSecret
from moerl.types.errors import WeightError
from moerl.types.push import BucketEntry, Transport
from moerl.weights.plan.buckets import Job, pieces_of
from moerl.weights.plan.spec_tensors import CPU
from moerl.weights.transport.disk_transport import DIRECTORY_KEY, DiskSender
from moerl.weights.transport.gpu_transport import finished
from moerl.weights.transport.links import Lender, rank_key
from moerl.weights.transport.network_transport import DEVICE_KEY, GroupJoin, NetworkSender
from moerl.weights.transport.relay_transport import RankRelay, readers_of
from moerl.weights.transport.rendezvous import JOIN_SECONDS, Deadline, Rendezvous
from moerl.weights.transport.shared_memory import NUM_BUFFERS, new_buffer
from moerl.weights.verify.digest import digest_halves, hex_digests

ReadPiece = Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor]
"""(name, start, shape): that box of the tensor, in the dtype in which it travels; possibly a view of a parameter."""


class WeightSender:
    """Order of calls: listen, connect, then per push digests, send, finish. After an error start again with a new one."""

    def __init__(
        self,
        transport: Transport,
        job: Job,
        read: ReadPiece,
        *,
        seconds: float,
        secret: RunSecret,
        rank: int = 0,
        relayed: Job = (),
        device: torch.device = CPU,
        host: str = "127.0.0.1",
        directory: Path | None = None,
        delta: bool = False,
    ):
        """`rank` of the trainer. `relayed`: buckets that it gets from others for readers of its node (relay), which has one of both.
        `seconds` bounds each call. `secret`: all sides of the push prove it. `device` is where the tensors are, and buckets stay; files are
        written from host memory (disk). `host` is the address at which others reach this process. `directory`, which is this sender's
        alone, is where its files lie; `delta`: they hold only what changed (disk)."""
        self._transport: Transport = transport
        self._job, self._read, self._seconds, self._host = job, read, seconds, host
        self._secret, self._rank, self._relayed = secret, rank, relayed
        self._device = CPU if transport == "disk" else device
        self._buffers = [new_buffer(self._device) for _ in range(NUM_BUFFERS)]
        self._rendezvous: Rendezvous | None = None
        self._lender: Lender | None = None
        self._network: NetworkSender | None = None
        self._relay: RankRelay | None = None
        self._disk: DiskSender | None = None
        if transport == "disk":
            if directory is None:
                raise WeightError("weights.transport = disk: the sender needs a directory for its files")
            self._disk = DiskSender(directory, delta=delta)

    def listen(self, *, is_first: bool) -> str:
        """The first sender's is the address for TransportOffer: host:port of a new store."""
        if self._disk is not None:
            self._disk.listen()
        if not is_first:
            return ""
        self._rendezvous = Rendezvous.open(self._host, self._secret, Deadline(self._seconds))
        if self._disk is not None:
            self._rendezvous.tell(DIRECTORY_KEY, str(self._disk.directory))
        self._rendezvous.tell(DEVICE_KEY, self._device.type)
        return self._rendezvous.address

    def connect(self, address: str, *, senders: Sequence[int], num_readers: int) -> None:
        """From here on readers can connect to this sender; nccl, relay: returns when all have joined. `address`: what the first sender's
        listen returned. `senders`: ranks that take part. `num_readers`: processes of all servers."""
        deadline = Deadline(min(self._seconds, JOIN_SECONDS))
        with self._closing_on_error():
            if self._rendezvous is None:
                self._rendezvous = Rendezvous.join(address, self._secret, deadline)
            name, readers = f"trainer rank {self._rank}", readers_of(self._rank, self._job, self._relayed)
            if self._transport == "nccl":
                readers = {bucket.readers[0] for bucket in self._job}
            self._lender = Lender(rank_key(self._rank), name, self._host, self._rendezvous, readers)
            join = GroupJoin(rendezvous=self._rendezvous, device=self._device, host=self._host, deadline=deadline, seconds=self._seconds)
            if self._transport == "nccl":
                self._network = NetworkSender(join, self._lender, rank=self._rank, senders=senders, num_readers=num_readers)
            if self._transport == "relay":
                self._relay = RankRelay(join, self._lender, rank=self._rank, job=self._job, relayed=self._relayed, members=senders)

    def digests(self) -> list[str]:
        """Digests of the pieces of the job (`pieces_of`), made from what is held, not from what is sent."""
        return hex_digests([digest_halves(self._read(entry.name, entry.start, entry.shape)) for entry in pieces_of(self._job)])

    def send(self) -> int:
        """All buckets, in order; returns when they have been read. Bytes written (disk)."""
        deadline, num_written = Deadline(self._seconds), 0
        with self._closing_on_error():
            if self._lender is None:
                raise WeightError("this rank has no connection to readers: it was never connected, or an error ended it; connect again")
            self._lender.accept(deadline)
            if self._relay is not None:
                self._relay.carry(lambda index: (self.pack(index), self._buffers[index % NUM_BUFFERS].source), deadline)
                return 0
            for index in range(len(self._job)):
                self._wait(index % NUM_BUFFERS, deadline)
                num_written += self._send(index)
            for index in range(len(self._job), len(self._job) + NUM_BUFFERS):
                self._wait(index % NUM_BUFFERS, deadline)
        return num_written

    def pack(self, index: int) -> torch.Tensor:
        """Fill the buffer of bucket `index`: its bytes, uint8 [bucket.num_bytes]."""
        bucket = self._job[index]
        data = self._buffers[index % NUM_BUFFERS].reserve(bucket.num_bytes)[: bucket.num_bytes]
        for entry in bucket.entries:
            self._place(entry, data)
        finished(self._device)
        return data

    def finish(self) -> None:
        """Every bucket of the push was installed everywhere, and no reader has this rank's memory mapped any more. It is given back."""
        for buffer in self._buffers:
            buffer.release()
        if self._relay is not None:
            self._relay.rest()
        if self._disk is not None:
            self._disk.end()

    def close(self) -> None:
        """Safe to call twice."""
        self._disconnect()
        if self._disk is not None:
            self._disk.close()
        for buffer in self._buffers:
            buffer.close()

    def _wait(self, slot: int, deadline: Deadline) -> None:
        """Until nobody needs what is in the buffer."""
        outlet = self._network or self._lender
        assert outlet is not None, "send looks"
        outlet.wait(slot, deadline)

    def _send(self, index: int) -> int:
        bucket, data, slot, num_written = self._job[index], self.pack(index), index % NUM_BUFFERS, 0
        if self._network is not None:
            self._network.send(data, bucket, slot=slot)
            return 0
        source = self._buffers[slot].source
        if self._disk is not None:
            path, num_written = self._disk.write(index, data)
            source = str(path)
        assert self._lender is not None, "send looks"
        self._lender.lend(bucket, source, bucket.readers, slot=slot)
        return num_written

    def _place(self, entry: BucketEntry, data: torch.Tensor) -> None:
        piece = self._read(entry.name, entry.start, entry.shape).detach()
        if piece.nbytes != entry.num_bytes:
            raise WeightError(
                f"tensor {entry.name!r}: this rank holds {piece.nbytes} bytes of it at {list(entry.start)}, where the plan of the push has "
                f"{entry.num_bytes}; the plan was made for another layout"
            )
        data[entry.offset : entry.offset + entry.num_bytes].view(piece.dtype).view(piece.shape).copy_(piece)

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """So that nobody waits for this rank any more."""
        try:
            yield
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        for side in (self._network, self._relay, self._lender, self._rendezvous):
            if side is not None:
                side.close()
        self._network, self._relay, self._lender, self._rendezvous = None, None, None, None
