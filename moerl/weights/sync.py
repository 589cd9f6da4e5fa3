"""The driver's side of a weight push: one version from the trainer into every receiver, or a WeightError that names each failure.

    connect: outline, needs -> plan   who sends what to whom; a plan with a fault, or that a receiver does not need so, is refused
    digests -> manifest               every trainer rank digests what it will send, all at once
    begin on all receivers            every refusal is gathered before any byte moves
    send on all ranks, install on all receivers: they lead each other through the buckets, which the driver has no part in
    finish on all receivers           from here on they serve the version

Pausing the engines around a push is the caller's. After a failed push every receiver is stale, and the next push connects anew.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, Protocol, TypeVar

from moerl.cluster.run_secret import RunSecret
from moerl.types.errors import WeightError
from moerl.types.push import Bucket, Needs, PushStats, Transport, TransportOffer
from moerl.weights.plan.buckets import Deliveries, Job, in_order, manifest_of
from moerl.weights.plan.run_plan import KeptPlan, Nodes, Outline, RankPlaces
from moerl.weights.plan.transfer_plan import Rails
from moerl.weights.push_calls import PATIENCE, SOURCE, OnLate, PushCalls
from moerl.weights.receiver_protocol import WeightReceiver

logger = logging.getLogger(__name__)
T = TypeVar("T")


class WeightSource(Protocol):
    """Trainer's side of a push: the verbs of weights.send.WeightSender on its ranks, to which train/push/push_source.py (MegatronSource,
    the only one of a run) carries them. Only `digests` may be collective among ranks."""

    async def outline(self) -> Outline:
        """Outline of every push."""

    async def listen(self, transport: Transport, jobs: Mapping[int, Job], seconds: float, secret: RunSecret) -> str:
        """Start afresh with this transport, on these ranks; the address for TransportOffer. `seconds`, `secret`: as there."""

    async def connect(self, address: str, num_readers: int) -> None:
        """Readers can connect to every rank; nccl, relay: returns when all have joined. `num_readers`: processes of all servers."""

    async def digests(self) -> Mapping[int, Sequence[str]]:
        """By rank, of the pieces of its job (plan/buckets.py, pieces_of). A push begins."""

    async def send(self) -> int:
        """All ranks send their jobs; returns when everything was read. Bytes written (disk)."""

    async def finish(self) -> None:
        """Every bucket of the push was installed everywhere."""


class WeightSync:
    """Pushes one at a time, from one event loop."""

    def __init__(
        self,
        source: WeightSource,
        receivers: Mapping[str, WeightReceiver],
        *,
        transport: Transport,
        nodes: Nodes | None = None,
        ranks: RankPlaces | None = None,
        rails: Rails | None = None,
        plan: KeptPlan | None = None,
        deadline_seconds: float = 300.0,
        settle_seconds: float = 5.0,
        on_late: OnLate | None = None,
    ):
        """`receivers` by the name errors use. `nodes` of theirs, for a network; None: all on one. `ranks`: places of the trainer's, for
        relay. `rails`: of all processes, servers' in that order; None: any two cards are as good. `plan`: of the pushes before this object;
        None: there were none. `deadline_seconds`, `settle_seconds`, `on_late`: of PushCalls; the first bounds the time in which all
        bytes must arrive."""
        self._calls = PushCalls(deadline_seconds=deadline_seconds, settle_seconds=settle_seconds, on_late=on_late)
        self._plan = KeptPlan() if plan is None else plan
        self._source = source
        self._receivers = dict(receivers)
        self._transport: Transport = transport
        self._rails = rails if transport == "nccl" else None
        self._nodes: Nodes | None = None
        if transport in ("nccl", "relay"):
            self._nodes = dict.fromkeys(receivers, ("",)) if nodes is None else nodes
        self._ranks = ranks if transport == "relay" else None
        self._deliveries: Deliveries | None = None
        self._connected = False

    async def connect(self) -> None:
        """Plan, and build the transport. `push` does it when there is none or an error ended it; call it after a receiver was restarted."""
        self._connected = False
        asked = {name: receiver.needs() for name, receiver in self._receivers.items()}
        needs: dict[str, Needs] = await self._calls.together("asking for needs", asked)
        if self._plan.outline is None:
            self._plan.outline = await self._source.outline()
        self._deliveries = await asyncio.to_thread(self._plan.of, needs, self._nodes, self._ranks, self._rails)
        jobs, seconds = self._deliveries.jobs, PATIENCE * self._calls.deadline_seconds
        secret = RunSecret.new()  # whoever was to be in an attempt before this one is not in it
        address = await self._source.listen(self._transport, jobs, seconds, secret)
        num_readers = sum(map(len, needs.values()))
        calls: dict[str, Coroutine[Any, Any, None]] = {SOURCE: self._source.connect(address, num_readers)}
        buckets = in_order(jobs)
        for first, (name, processes) in zip(accumulate(map(len, needs.values()), initial=0), needs.items(), strict=False):
            own = frozenset(range(first, first + len(processes)))
            offer = TransportOffer(
                transport=self._transport,
                address=address,
                server=name,
                senders=tuple(sorted(jobs)),
                num_readers=num_readers,
                reader=first,
                buckets=tuple(bucket for bucket in buckets if not own.isdisjoint(bucket.readers)),
                seconds=seconds,
                secret=secret.key,
            )
            calls[name] = self._receivers[name].connect(offer)
        await self._calls.together(f"connecting by {self._transport}", calls)
        self._connected = True

    async def push(self, version: int) -> PushStats:
        """Bring the trainer's weights to every receiver as `version`. Raises WeightError with the cause of every failing side."""
        started = time.perf_counter()
        if not self._connected:
            await self.connect()
        assert self._deliveries is not None, "connect plans"
        self._connected = False
        manifest = manifest_of(self._deliveries, await self._source.digests(), version=version)
        try:
            await self._calls.together("begin", {name: receiver.begin(manifest) for name, receiver in self._receivers.items()})
        except WeightError:
            self._plan.outline = None  # what a server refuses may have been left out of it
            raise
        installs: dict[str, Coroutine[Any, Any, Any]] = {name: receiver.install() for name, receiver in self._receivers.items()}
        num_written = (await self._calls.together("the transfer", {SOURCE: self._source.send(), **installs}))[SOURCE]
        push_ids = {name: secrets.token_hex(8) for name in self._receivers}
        await self._calls.together("finish", {name: receiver.finish(version, push_ids[name]) for name, receiver in self._receivers.items()})
        await self._source.finish()
        self._connected = True
        buckets = [bucket for job in self._deliveries.jobs.values() for bucket in job]
        stats = PushStats(
            version=version,
            num_tensors=len(manifest.tensors),
            num_bytes=sum(bucket.num_bytes for bucket in buckets),
            num_buckets=len(buckets),
            num_senders=len(self._deliveries.jobs),
            seconds=time.perf_counter() - started,
            num_written=num_written,
            push_ids=push_ids,
            num_network=0 if self._nodes is None else sum(_num_crossing(bucket) for bucket in buckets),
        )
        logger.info("pushed %s to %d receivers", stats, len(self._receivers))
        return stats


def _num_crossing(bucket: Bucket) -> int:
    """Bytes of its pieces that cross the network."""
    return 0 if bucket.relay == bucket.sender else sum(entry.num_bytes for entry in bucket.entries)


def resolve_transport(
    transport: Literal["auto", "ipc", "nccl", "disk"], *, source_hosts: Sequence[str], receiver_hosts: Sequence[str], shares_gpus: bool
) -> Transport:
    """auto: ipc if every trainer rank and every receiver run on one host, else nccl. That is relay if servers share the trainer's GPUs and
    every one has a rank on each of its hosts. WeightError for a host name that does not resolve."""
    if transport == "auto":
        common = set.intersection(*(_addresses(host) for host in (*source_hosts, *receiver_hosts)))
        transport = "ipc" if common else "nccl"
    return "relay" if transport == "nccl" and shares_gpus and set(receiver_hosts) <= set(source_hosts) else transport


def _addresses(host: str) -> set[str]:
    """The host's addresses; "here" stands for all of this host's own."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise WeightError(f"host = {host!r}: does not resolve ({error}); give an address this host can reach") from error
    return {"here" if _is_local(address) else address for address in found}


def _is_local(address: str) -> bool:
    """Only an address of this host can be bound."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
