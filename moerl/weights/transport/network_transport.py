"""Buckets from trainer ranks to the model processes that read them, point to point in a process group of their own: NCCL's between GPUs,
gloo's over TCP where the tensors are on CPU.

A bucket crosses once to a node: its first reader gets it into memory that it lends to the other readers of the node
(weights/transport/links.py). What reaches a first reader does so in the order of the rounds, which is every sender's too: NCCL does what it
is given in order, on both sides. A reader is told to receive the next bucket before it installs the one that came.

The group is built directly on the store of the push: the trainer's default process group stays untouched. Whoever meets an error drops its
group; its closed connections then end the others' waiting at once, and the deadline bounds what a closed connection cannot tell.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from moerl.cluster.error_texts import LATE
from moerl.types.errors import WeightError
from moerl.types.push import Bucket, TransportOffer
from moerl.weights.plan.spec_tensors import CPU
from moerl.weights.transport.gpu_transport import DeviceBuffer, NcclGroup, Transfer
from moerl.weights.transport.links import Borrower, Lender, describe, rank_key, reader_key
from moerl.weights.transport.rendezvous import Deadline, Rendezvous, explained
from moerl.weights.transport.shared_memory import NUM_BUFFERS, SharedBuffer, SharedReader, new_buffer

DEVICE_KEY = "moerl/device"
"""In the rendezvous of a push: the kind of device from which the trainer sends."""

Check = Callable[[], None]
"""WeightError if a side that this one may wait for is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJoin:
    """Joining of the processes that make a group for pushes."""

    rendezvous: Rendezvous
    device: torch.device
    """Where buckets are."""
    host: str
    """Address at which others reach this process."""
    deadline: Deadline
    """Time for all to join."""
    seconds: float
    """Length of one push at most."""


class NetworkSender:
    """One of the first ranks of the group; readers come after the senders. The constructor returns when all have joined."""

    def __init__(self, join: GroupJoin, lender: Lender, *, rank: int, senders: Sequence[int], num_readers: int):
        """`lender` is that of this process: it lends nothing here, but hears when a reader ends. `senders`: ranks of the trainer, of which
        this is `rank`."""
        self._lender, self._num_senders = lender, len(senders)
        self._sending: dict[int, tuple[Any, Bucket]] = {}
        """By slot: what the group gave to wait for."""
        place, world_size = list(senders).index(rank), len(senders) + num_readers
        with explained(f"weights.transport = nccl: not all {num_readers} readers and {len(senders)} senders met at {join.host}"):
            self._group = join_group(join, rank=place, world_size=world_size)

    def send(self, data: torch.Tensor, bucket: Bucket, *, slot: int) -> None:
        """Begin to send uint8 `data` to the bucket's first reader; `wait(slot)` before it is overwritten."""
        with explained(f"weights.transport = nccl: {describe(bucket)} could not be sent"):
            self._sending[slot] = (self._group.begin(Transfer(data, self._num_senders + bucket.readers[0], bucket.index), None), bucket)

    def wait(self, slot: int, deadline: Deadline) -> None:
        """Wait until the buffer that was sent last may be overwritten."""
        if (sending := self._sending.pop(slot, None)) is not None:
            with explained(f"weights.transport = nccl: {describe(sending[1])} could not be sent"):
                self._group.wait(sending[0], deadline, self._lender.check)

    def close(self) -> None:
        """Once."""
        self._sending = {}
        self._group.close()


class NetworkReader:
    """A rank behind the senders. The constructor returns when all have joined."""

    def __init__(
        self, rendezvous: Rendezvous, offer: TransportOffer, buckets: Sequence[Bucket], *, device: torch.device, deadline: Deadline
    ):
        """`buckets`: those that this process reads. `device` of its model; buckets are there or on CPU, as the trainer's are."""
        self._rendezvous, self._number, self._name = rendezvous, offer.reader, offer.server
        self._ranks = {sender: rank for rank, sender in enumerate(offer.senders)}
        self._own = [bucket for bucket in buckets if bucket.readers[0] == self._number]
        self._positions = {(bucket.sender, bucket.index): position for position, bucket in enumerate(self._own)}
        self._arriving: dict[int, tuple[torch.Tensor, Any]] = {}
        """By position in `_own`: memory, and what the group gave to wait for."""
        self._slots: list[SharedBuffer | DeviceBuffer] = []
        self._borrower = Borrower(SharedReader(), lambda bucket: reader_key(bucket.readers[0]))
        self._lender: Lender | None = None
        self._group: GlooGroup | NcclGroup | None = None
        try:
            device = _as_trainer(rendezvous.ask(DEVICE_KEY, deadline), device)
            self._slots = [new_buffer(device) for _ in range(NUM_BUFFERS)]
            self._join(rendezvous, offer, buckets, device, deadline)
        except WeightError:
            self.close()
            raise

    def _join(
        self, rendezvous: Rendezvous, offer: TransportOffer, buckets: Sequence[Bucket], device: torch.device, deadline: Deadline
    ) -> None:
        join = GroupJoin(rendezvous=rendezvous, device=device, host=rendezvous.own_host(), deadline=deadline, seconds=offer.seconds)
        others = {reader for bucket in self._own for reader in bucket.readers[1:]}
        if others:
            self._lender = Lender(reader_key(self._number), self._name, join.host, rendezvous, others)
        lenders = [rank_key(bucket.sender) if bucket.readers[0] == self._number else reader_key(bucket.readers[0]) for bucket in buckets]
        self._borrower.join(rendezvous, lenders, reader=self._number, name=self._name, deadline=deadline)
        rank, world_size = len(offer.senders) + self._number, len(offer.senders) + offer.num_readers
        with explained(f"weights.transport = nccl: could not join the trainer at {offer.address!r}"):
            self._group = join_group(join, rank=rank, world_size=world_size)

    def fetch(self, bucket: Bucket, deadline: Deadline) -> torch.Tensor:
        """uint8 [bucket.num_bytes], valid until `done`. In every push all buckets must be fetched, in the order of the constructor's."""
        if bucket.readers[0] != self._number:
            return self._borrower.fetch(bucket, deadline)
        position = self._positions[bucket.sender, bucket.index]
        if position == 0:
            if self._lender is not None:
                self._lender.accept(deadline)
                self._lender.drain(deadline)
            self._receive(position, deadline)
        data, receiving = self._arriving.pop(position)
        with explained(f"weights.transport = nccl: {describe(bucket)} did not arrive"):
            assert self._group is not None, "a receive has begun"
            self._group.wait(receiving, deadline, self._check)
        if self._lender is not None:
            self._lender.lend(bucket, self._slots[position % NUM_BUFFERS].source, bucket.readers[1:], slot=position % NUM_BUFFERS)
        if position + 1 < len(self._own):
            self._receive(position + 1, deadline)
        return data

    def done(self, bucket: Bucket) -> None:
        """It is installed here."""
        if bucket.readers[0] != self._number:
            self._borrower.done(bucket)

    def rest(self) -> None:
        """As Borrower's."""
        self._borrower.rest()

    def close(self) -> None:
        """Safe to call twice."""
        self._arriving.clear()
        if self._group is not None:
            self._group.close()
        self._group = None
        self._borrower.close()
        if self._lender is not None:
            self._lender.close()
        for memory in self._slots:
            memory.close()
        self._rendezvous.close()

    def _receive(self, position: int, deadline: Deadline) -> None:
        """Begin to receive that bucket, in memory that nobody reads any more."""
        bucket, slot = self._own[position], position % NUM_BUFFERS
        if self._lender is not None:
            self._lender.wait(slot, deadline)
        data = self._slots[slot].reserve(bucket.num_bytes)[: bucket.num_bytes]
        with explained(f"weights.transport = nccl: {describe(bucket)} did not arrive"):
            assert self._group is not None, "an error ends the push"
            self._arriving[position] = (data, self._group.begin(None, Transfer(data, self._ranks[bucket.sender], bucket.index)))

    def _check(self) -> None:
        self._borrower.check()
        if self._lender is not None:
            self._lender.check()


def _as_trainer(kind: str, device: torch.device) -> torch.device:
    """Where buckets arrive, if the trainer's are on a device of that kind."""
    if kind == CPU.type:
        return CPU
    if kind != device.type:
        rule = f"the trainer sends from {kind}, and this server's model is on {device.type}"
        raise WeightError(f"weights.transport = nccl: {rule}; both must be on GPUs, or set weights.transport=disk")
    return device


def join_group(join: GroupJoin, *, rank: int, world_size: int) -> "GlooGroup | NcclGroup":
    """Returns when all have joined."""
    store, deadline = join.rendezvous.store, join.deadline
    if join.device.type == "cuda":
        return NcclGroup(store, rank=rank, world_size=world_size, device=join.device, deadline=deadline, seconds=join.seconds)
    return GlooGroup(store, rank=rank, world_size=world_size, host=join.host, deadline=deadline)


class GlooGroup:
    """Holds the only references to a process group and to what was begun on it. Connections close when both are destroyed and not before
    (abort leaves them open), and another reference, be it in the frames of a traceback, would keep the other ranks waiting."""

    def __init__(self, store: Store, *, rank: int, world_size: int, host: str, deadline: Deadline):
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
        # The default device listens on what the host name resolves to, which on many systems is a loopback address.
        options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
        options._timeout = timedelta(seconds=deadline.left())
        self._store = store  # C++ alone would not keep one that is written in Python
        self._only = ProcessGroupGloo(PrefixStore("moerl/weights", store), rank, world_size, options)
        self._begun: dict[int, list[Any]] = {}
        self._numbers = count()

    def begin(self, out: Transfer | None, into: Transfer | None) -> int:
        """Number of what to wait for."""
        number = next(self._numbers)
        begun = self._begun[number] = []
        if into is not None:
            begun.append(self._only.recv([into.data], into.peer, into.tag))  # type: ignore[attr-defined]  # absent from torch's stubs
        if out is not None:
            begun.append(self._only.send([out.data], out.peer, out.tag))  # type: ignore[attr-defined]  # absent from torch's stubs
        return number

    def wait(self, number: int, deadline: Deadline, check: Check) -> None:
        """`check` is not needed: a connection that closes ends the wait."""
        try:
            for work in self._begun[number]:
                work.wait(timedelta(seconds=deadline.left()))
        except RuntimeError as error:
            if "Timed out" not in str(error):
                raise
            raise WeightError(f"a bucket {LATE} {deadline} ({error})") from error
        finally:
            work = None  # this frame may outlive the group, in a traceback
            del self._begun[number]

    def close(self) -> None:
        self._begun.clear()
        del self._only
