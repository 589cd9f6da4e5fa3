"""The driver's side of a weight push: one version from the trainer into every receiver, or a WeightError that names each failure.

    begin on all receivers            every refusal is gathered before any byte moves
    per bucket: pack, then at once    source.transmit | receiver.install | receiver.install | ...
    finish on all receivers           from here on they serve the version

Pausing the engines around a push is the caller's. After a failed push every receiver is stale, and the next push connects anew.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from moerl.push_types import Bucket, Manifest, Transport, TransportOffer
from moerl.rollout.engine import WeightReceiver
from moerl.types import HangError, WeightError

logger = logging.getLogger(__name__)

SOURCE = "trainer"
"""What the sending side is called in errors."""


OnLate = Callable[[str, Sequence[str]], Awaitable[HangError]]
"""Called with what was done (of the push) and the names of the sides that did not arrive: the report about them."""


class WeightSource(Protocol):
    """What the trainer offers; rank 0 implements it over weights.send.WeightSender."""

    async def manifest(self, version: int) -> Manifest: ...

    async def listen(self, transport: Transport, num_receivers: int) -> str:
        """Start afresh with this transport; the address for TransportOffer."""

    async def connect(self) -> None:
        """gloo: returns when every receiver has joined."""

    async def next_bucket(self, index: int) -> Bucket | None:
        """Pack bucket `index`; None after the last. 0 begins a push, also after an aborted one."""

    async def transmit(self, bucket: Bucket) -> None:
        """gloo: broadcast the bucket just packed."""

    async def abandon(self) -> None:
        """After a bucket that did not arrive: end the push, so that the trainer can be used for other things."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushStats:
    version: int
    num_tensors: int
    num_bytes: int
    """Sent to each receiver, with padding."""
    num_buckets: int
    seconds: float
    num_written: int = 0
    """disk: bytes of its files."""


class WeightSync:
    """Pushes one at a time, from one event loop."""

    def __init__(
        self,
        source: WeightSource,
        receivers: Mapping[str, WeightReceiver],
        *,
        transport: Transport,
        deadline_seconds: float = 300.0,
        settle_seconds: float = 5.0,
        on_late: OnLate | None = None,
    ):
        """`receivers` by the name errors use. `deadline_seconds` bounds one call to all (a bucket, say); once one has failed, the others
        get `settle_seconds` to end by themselves before their calls are cancelled. `on_late`: looks at those first."""
        self._on_late = on_late
        self._source = source
        self._receivers = dict(receivers)
        self._transport: Transport = transport
        self._deadline_seconds = deadline_seconds
        self._settle_seconds = settle_seconds
        self._connected = False

    async def connect(self) -> None:
        """Build the transport. `push` does it when there is none or an error ended it; call it after a receiver was restarted."""
        self._connected = False
        address = await self._source.listen(self._transport, len(self._receivers))
        world_size = len(self._receivers) + 1
        offers = {
            name: TransportOffer(transport=self._transport, address=address, rank=rank, world_size=world_size)
            for rank, name in enumerate(self._receivers, start=1)
        }
        calls = {name: receiver.connect(offers[name]) for name, receiver in self._receivers.items()}
        await self._together(f"connecting by {self._transport}", {SOURCE: self._source.connect(), **calls})
        self._connected = True

    async def push(self, version: int) -> PushStats:
        """Bring the trainer's weights to every receiver as `version`. Raises WeightError with the cause of every failing side."""
        started = time.perf_counter()
        if not self._connected:
            await self.connect()
        self._connected = False
        manifest = await self._source.manifest(version)
        if manifest.version != version:
            raise WeightError(
                f"push(version={version}): the trainer's manifest is of version {manifest.version}; push after its update ended"
            )
        await self._together("begin", {name: receiver.begin(manifest) for name, receiver in self._receivers.items()})
        num_buckets, num_bytes, num_written = await self._move()
        await self._together("finish", {name: receiver.finish(version) for name, receiver in self._receivers.items()})
        self._connected = True
        stats = PushStats(
            version=version,
            num_tensors=len(manifest.tensors),
            num_bytes=num_bytes,
            num_buckets=num_buckets,
            seconds=time.perf_counter() - started,
            num_written=num_written,
        )
        logger.info("pushed %s to %d receivers", stats, len(self._receivers))
        return stats

    async def _move(self) -> tuple[int, int, int]:
        """The number of buckets, of their bytes, and of the bytes of their files."""
        index = num_bytes = num_written = 0
        while (bucket := await self._source.next_bucket(index)) is not None:
            installs = {name: receiver.install(bucket) for name, receiver in self._receivers.items()}
            try:
                await self._together(f"bucket {index}", {SOURCE: self._source.transmit(bucket), **installs})
            except WeightError:
                await self._source.abandon()
                raise
            index, num_bytes, num_written = index + 1, num_bytes + bucket.num_bytes, num_written + bucket.num_written
        return index, num_bytes, num_written

    async def _together(self, step: str, calls: Mapping[str, Coroutine[object, object, None]]) -> None:
        """Run all calls at once; WeightError with every failure, first failure first, when not all succeed in time."""
        tasks: dict[str, asyncio.Future[None]] = {name: asyncio.ensure_future(call) for name, call in calls.items()}
        ended: list[asyncio.Future[None]] = []
        late: HangError | None = None
        for task in tasks.values():
            task.add_done_callback(ended.append)
        try:
            _, pending = await asyncio.wait(tasks.values(), timeout=self._deadline_seconds, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
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


def resolve_transport(transport: Literal["auto", "shm", "gloo", "disk"], *, source_host: str, receiver_hosts: Sequence[str]) -> Transport:
    """auto: shm if every receiver runs on the trainer's host, else gloo. Raises WeightError for a host name that does not resolve."""
    if transport != "auto":
        return transport
    source = _addresses(source_host)
    return "shm" if all(source & _addresses(host) for host in receiver_hosts) else "gloo"


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
    lines = [
        f"weight push failed at {step}, {len(failures)} sides failed, the first one first; every receiver is stale until a push succeeds"
    ]
    for name, failure in failures.items():
        reason = "did not end in time and was cancelled" if name in silent else f"{type(failure).__name__}: {failure}"
        lines.append(f"* {name}: {reason}")
    return "\n".join(lines)
