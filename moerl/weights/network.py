"""Buckets from trainer ranks to the model processes that read them, point to point in a process group of their own: NCCL's between GPUs,
gloo's over TCP where the tensors are on CPU.

A bucket crosses once to a node: its first reader gets it into memory that the other readers of the node map (weights/relay.py).

The group is built directly on a TCPStore: the trainer's default process group stays untouched. Whoever meets an error drops its group;
its closed connections then end the others' waiting at once, and the timeout bounds what a closed connection cannot tell.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from moerl.push_types import Bucket, TransportOffer
from moerl.types import WeightError
from moerl.weights.cuda import DeviceBuffer, NcclGroup
from moerl.weights.relay import NUM_SLOTS
from moerl.weights.shm import SharedBuffer, SharedReader, new_buffer
from moerl.weights.spec import CPU

TRANSFER_SECONDS = 120.0
"""Deadline for all to join the group, and for one bucket: 100 MB/s for a bucket of 12 GB."""


class NetworkSender:
    """One of the first ranks of the group; readers come after the senders."""

    def __init__(self, *, host: str, device: torch.device, timeout_seconds: float):
        self._host, self._device = host, device
        self._timeout = timedelta(seconds=timeout_seconds)
        self._store: Store | None = None
        self._group: GlooGroup | NcclGroup | None = None
        self._num_senders = 0
        self._sending: dict[int, Any] = {}
        self.rank = 0

    def listen(self) -> str:
        """host:port of a new store on a free port; an earlier group is dropped."""
        self.close()
        with _explained(f"weights.transport = nccl: no store at {self._host}"):
            store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
            store.set(_DEVICE_KEY, self._device.type)
        self._store = store
        return f"{self._host}:{store.port}"

    def connect(self, address: str, *, rank: int, world_size: int, num_senders: int) -> None:
        """`address`: what the first sender's listen returned. Returns when all have joined."""
        with _explained(f"weights.transport = nccl: not all {world_size - num_senders} readers and {num_senders} senders met at {address}"):
            if self._store is None:
                host, port = _split(address)
                self._store = TCPStore(host, port, is_master=False, timeout=self._timeout)
            self._group = _group(self._store, self._device, rank=rank, world_size=world_size, host=self._host, timeout=self._timeout)
        self.rank, self._num_senders = rank, num_senders

    def send(self, data: torch.Tensor, bucket: Bucket, *, slot: int) -> None:
        """Begin to send uint8 `data` to the bucket's first reader; `wait(slot)` before it is overwritten."""
        if self._group is None:
            raise WeightError("no process group to the readers: it was never connected, or an error dropped it; connect again")
        with self._dropping():
            self._sending[slot] = self._group.send(data, self._num_senders + bucket.readers[0], bucket.index)

    def wait(self, slot: int) -> None:
        """What was sent from it last has arrived."""
        with self._dropping():
            if (work := self._sending.pop(slot, None)) is not None and self._group is not None:
                self._group.wait(work)

    def close(self) -> None:
        """Safe to call twice."""
        self._sending = {}
        if self._group is not None:
            self._group.close()
        self._group, self._store = None, None

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            with _explained("weights.transport = nccl: a bucket could not be sent"):
                yield
        except WeightError:
            self.close()
            raise


class NetworkReader:
    """A rank behind the senders. The constructor returns when all have joined."""

    def __init__(self, offer: TransportOffer, *, device: torch.device, timeout_seconds: float):
        """`device` of this server's model. Buckets are there or on CPU, as the trainer's are."""
        host, port = _split(offer.address)
        timeout = timedelta(seconds=timeout_seconds)
        self._number = offer.reader
        self._slots: list[SharedBuffer | DeviceBuffer] = []
        self._of_others = SharedReader()
        self._group: GlooGroup | NcclGroup | None = None
        try:
            with _explained(f"weights.transport = nccl: could not join the trainer at {offer.address!r}"):
                self._store = TCPStore(host, port, is_master=False, timeout=timeout)
                device = _as_trainer(self._store.get(_DEVICE_KEY).decode(), device)
                self._slots = [new_buffer(device) for _ in range(NUM_SLOTS)]
                own_host = _address_towards(host, port)
                self._group = _group(self._store, device, rank=offer.rank, world_size=offer.world_size, host=own_host, timeout=timeout)
        except WeightError:
            self.close()
            raise

    def fetch(self, bucket: Bucket) -> torch.Tensor:
        """uint8 [bucket.num_bytes], valid until the slot's next bucket."""
        if self._group is None:
            raise WeightError("no process group to the trainer: an error dropped it; the next push must connect again")
        if bucket.relay is not None:
            return self._of_others.fetch(replace(bucket, source=self._memory_of(bucket.relay, bucket.slot)))
        memory = self._slots[bucket.slot]
        data = memory.reserve(bucket.num_bytes)[: bucket.num_bytes]
        with _explained(f"weights.transport = nccl: bucket {bucket.index} of trainer rank {bucket.sender} did not arrive"):
            self._group.receive(data, int(bucket.source), bucket.index)
            self._store.set(_memory_key(self._number, bucket.slot), memory.source)  # on a GPU another one when it has grown
        return data

    def close(self) -> None:
        """Safe to call twice."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._of_others.close()
        for memory in self._slots:
            memory.close()

    def _memory_of(self, reader: int, slot: int) -> str:
        with _explained(f"weights.transport = nccl: the memory of reader {reader} on this node is not known"):
            return self._store.get(_memory_key(reader, slot)).decode()


def _as_trainer(kind: str, device: torch.device) -> torch.device:
    """Where buckets arrive, if the trainer's are on a device of that kind."""
    if kind == CPU.type:
        return CPU
    if kind != device.type:
        rule = f"the trainer sends from {kind}, and this server's model is on {device.type}"
        raise WeightError(f"weights.transport = nccl: {rule}; both must be on GPUs, or set weights.transport=disk")
    return device


def _group(store: Store, device: torch.device, *, rank: int, world_size: int, host: str, timeout: timedelta) -> "GlooGroup | NcclGroup":
    if device.type == "cuda":
        return NcclGroup(store, rank=rank, world_size=world_size, device=device, timeout=timeout)
    return GlooGroup(store, rank=rank, world_size=world_size, host=host, timeout=timeout)


class GlooGroup:
    """Holds the only reference to a process group. Connections close when the group is destroyed and not before (abort leaves them
    open), and a second reference, be it in the frames of a traceback, would keep the other ranks waiting."""

    def __init__(self, store: Store, *, rank: int, world_size: int, host: str, timeout: timedelta):
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
        # The default device listens on what the host name resolves to, which on many systems is a loopback address.
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        self._only = ProcessGroupGloo(PrefixStore("moerl/weights", store), rank, world_size, options)

    def send(self, data: torch.Tensor, rank: int, tag: int) -> Any:
        """Work that has begun."""
        return self._only.send([data], rank, tag)  # type: ignore[attr-defined]  # absent from torch's stubs

    def receive(self, data: torch.Tensor, rank: int, tag: int) -> None:
        self._only.recv([data], rank, tag).wait()  # type: ignore[attr-defined]  # absent from torch's stubs

    def wait(self, work: Any) -> None:
        work.wait()

    def close(self) -> None:
        del self._only


_DEVICE_KEY = "moerl/device"


def _memory_key(reader: int, slot: int) -> str:
    return f"moerl/memory/{reader}/{slot}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _address_towards(host: str, port: int) -> str:
    """This host's own address on the route to `host`. A connected UDP socket sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Errors of torch.distributed (RuntimeError) and of sockets as WeightError."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, WeightError):
            raise
        raise WeightError(f"{what} ({error}); see that every rollout server is alive and reaches the trainer's host") from error
