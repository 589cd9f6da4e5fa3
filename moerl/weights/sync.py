"""The driver's side of a weight push: one version from the trainer into every receiver, or a WeightError that names each failure.

    connect: outline, needs -> plan   who sends what to whom; a plan with a fault, or that a receiver does not need so, is refused
    digests -> manifest               every trainer rank digests what it will send, all at once
    begin on all receivers            every refusal is gathered before any byte moves
    per trainer rank: pack bucket n, while its readers install bucket n - 1
    finish on all receivers           from here on they serve the version

Pausing the engines around a push is the caller's. After a failed push every receiver is stale, and the next push connects anew.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol, TypeVar

from moerl.push_types import Bucket, Needs, PushStats, Transport, TransportOffer
from moerl.rollout.engine import WeightReceiver
from moerl.types import HangError, WeightError
from moerl.weights.deliveries import Deliveries, Job, manifest_of
from moerl.weights.fleet_plan import Nodes, Outline, plan_deliveries
from moerl.weights.relay import Relays
from moerl.weights.streams import FAILED_SIDE, Streams

logger = logging.getLogger(__name__)
T = TypeVar("T")

SOURCE = "trainer"
"""What the sending side is called in errors."""


OnLate = Callable[[str, Sequence[str]], Awaitable[HangError]]
"""Called with what was done (of the push) and the names of the sides that did not arrive: the report about them."""


class WeightSource(Protocol):
    """What the trainer offers: the verbs of weights.send.WeightSender on its ranks. Only `digests` may be collective among them."""

    async def outline(self) -> Outline:
        """Of every push."""

    async def listen(self, transport: Transport, jobs: Mapping[int, Job]) -> str:
        """Start afresh with this transport, on these ranks; the address for TransportOffer."""

    async def connect(self, address: str, world_size: int) -> None:
        """nccl: returns when every reader has joined. The senders are the first ranks of its group, by their ranks in the trainer."""

    async def digests(self) -> Mapping[int, Sequence[str]]:
        """By rank, of all entries of its job. A push begins."""

    async def pack(self, rank: int, index: int) -> Bucket:
        """The rank fills bucket `index` of its job, and sends it where that takes a sender."""

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
        deadline_seconds: float = 300.0,
        settle_seconds: float = 5.0,
        on_late: OnLate | None = None,
    ):
        """`receivers` by the name errors use. `nodes` of theirs, for a network; None: all on one. `deadline_seconds` bounds one call to all
        (a bucket, say); once one has failed, the others get `settle_seconds` to end by themselves before their calls are cancelled.
        `on_late`: looks at those first."""
        self._on_late = on_late
        self._source = source
        self._receivers = dict(receivers)
        self._transport: Transport = transport
        self._nodes: Nodes | None = None
        if transport == "nccl":
            self._nodes = dict.fromkeys(receivers, ("",)) if nodes is None else nodes
        self._deadline_seconds = deadline_seconds
        self._settle_seconds = settle_seconds
        self._deliveries: Deliveries | None = None
        self._readers: dict[str, range] = {}
        self._connected = False

    async def connect(self) -> None:
        """Plan, and build the transport. `push` does it when there is none or an error ended it; call it after a receiver was restarted."""
        self._connected = False
        found = await self._plan()
        address = await self._source.listen(self._transport, found.jobs)
        num_senders, num_readers = len(found.jobs), sum(map(len, self._readers.values()))
        offer = TransportOffer(transport=self._transport, address=address, world_size=num_senders + num_readers)
        calls: dict[str, Coroutine[Any, Any, None]] = {SOURCE: self._source.connect(address, offer.world_size)}
        for name, receiver in self._receivers.items():
            first = self._readers[name].start
            calls[name] = receiver.connect(replace(offer, reader=first, rank=num_senders + first))
        await self._together(f"connecting by {self._transport}", calls)
        self._connected = True

    async def push(self, version: int) -> PushStats:
        """Bring the trainer's weights to every receiver as `version`. Raises WeightError with the cause of every failing side."""
        started = time.perf_counter()
        if not self._connected:
            await self.connect()
        assert self._deliveries is not None, "connect plans"
        self._connected = False
        manifest = manifest_of(self._deliveries, await self._source.digests(), version=version)
        await self._together("begin", {name: receiver.begin(manifest) for name, receiver in self._receivers.items()})
        install = self._install if self._nodes is None else Relays(self._deliveries.jobs, self._install).install
        streams = Streams(self._deliveries.jobs, self._source.pack, install, settle_seconds=self._settle_seconds)
        try:
            buckets = await streams.run()
        except WeightError as error:
            raise await self._with_lost(error) from error.__cause__
        await self._together("finish", {name: receiver.finish(version) for name, receiver in self._receivers.items()})
        await self._source.finish()
        self._connected = True
        stats = PushStats(
            version=version,
            num_tensors=len(manifest.tensors),
            num_bytes=sum(bucket.num_bytes for bucket in buckets),
            num_buckets=len(buckets),
            num_senders=len(self._deliveries.jobs),
            seconds=time.perf_counter() - started,
            num_written=sum(bucket.num_written for bucket in buckets),
            num_network=0 if self._nodes is None else sum(entry.num_bytes for bucket in buckets for entry in bucket.entries),
        )
        logger.info("pushed %s to %d receivers", stats, len(self._receivers))
        return stats

    async def _plan(self) -> Deliveries:
        outline = await self._source.outline()
        needs: dict[str, Needs] = await self._together("asking for needs", {n: receiver.needs() for n, receiver in self._receivers.items()})
        self._deliveries = await asyncio.to_thread(plan_deliveries, outline, needs, self._nodes)
        ends = list(accumulate(map(len, needs.values()), initial=0))
        self._readers = {name: range(first, end) for name, (first, end) in zip(needs, pairwise(ends), strict=True)}
        return self._deliveries

    async def _install(self, bucket: Bucket) -> None:
        chosen = [name for name, processes in self._readers.items() if not set(processes).isdisjoint(bucket.readers)]
        calls = {name: self._receivers[name].install(bucket) for name in chosen}
        await self._together(f"bucket {bucket.index} of trainer rank {bucket.sender}", calls)

    async def _with_lost(self, error: WeightError) -> WeightError:
        """With the receivers that are gone: others may fail for their sake before anything is asked of them again."""
        asked = {name: asyncio.ensure_future(receiver.needs()) for name, receiver in self._receivers.items()}
        done, late = await asyncio.wait(asked.values(), timeout=self._settle_seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        gone = {name: task.exception() for name, task in asked.items() if task in done}
        sides = [_side(name, cause) for name, cause in gone.items() if cause is not None and f"{FAILED_SIDE}{name}: " not in str(error)]
        return WeightError(FAILED_SIDE.join([str(error), *sides]))

    async def _together(self, step: str, calls: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
        """All calls at once, and what they return; WeightError with every failure, first failure first, when not all succeed in time."""
        tasks: dict[str, asyncio.Future[T]] = {name: asyncio.ensure_future(call) for name, call in calls.items()}
        ended: list[asyncio.Future[T]] = []
        late: HangError | None = None
        for task in tasks.values():
            task.add_done_callback(ended.append)
        try:
            done, pending = await asyncio.wait(tasks.values(), timeout=self._deadline_seconds, return_when=asyncio.FIRST_EXCEPTION)
            if pending and any(task.exception() is not None for task in done):
                _, pending = await asyncio.wait(pending, timeout=self._settle_seconds)
            if pending and self._on_late is not None:
                late = await self._on_late(step, [name for name, task in tasks.items() if not task.done()])
        finally:
            silent = [name for name, task in tasks.items() if not task.done()]
            for name in silent:
                tasks[name].cancel()
            outcomes = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
        await asyncio.sleep(0)  # from Python 3.12 on a gather of finished tasks does not yield, and the last have not been noted yet
        in_order = sorted(tasks, key=lambda name: ended.index(tasks[name]))
        failures = {name: failure for name in in_order if isinstance(failure := outcomes[name], BaseException)}
        if failures:
            said = _explain(step, failures, silent)
            if late is not None:
                raise WeightError(f"{said}\n{late}") from late
            raise WeightError(said) from next(iter(failures.values()))
        return {name: task.result() for name, task in tasks.items()}


def resolve_transport(
    transport: Literal["auto", "ipc", "nccl", "disk"], *, source_hosts: Sequence[str], receiver_hosts: Sequence[str]
) -> Transport:
    """auto: ipc if every trainer rank and every receiver run on one host, else nccl. WeightError for a host name that does not resolve."""
    if transport != "auto":
        return transport
    common = set.intersection(*(_addresses(host) for host in (*source_hosts, *receiver_hosts)))
    return "ipc" if common else "nccl"


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


def _explain(step: str, failures: Mapping[str, BaseException], silent: Sequence[str]) -> str:
    lines = [f"weight push failed at {step}; every receiver is stale until a push succeeds. What failed, the first one first:"]
    for name, failure in failures.items():
        lines.append(f"{name}: did not end in time and was cancelled" if name in silent else _side(name, failure))
    return FAILED_SIDE.join(lines)


def _side(name: str, failure: BaseException) -> str:
    return f"{name}: {type(failure).__name__}: {failure}"
