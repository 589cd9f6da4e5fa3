"""The state of a server around an engine: paused, asleep, stale; how a push goes. Its requests are in request_table.py.

Engines' own pauses differ, so requests that must wait are kept in the table. The engine is held (Core.hold) while the server is stale,
asleep, or paused in mode keep or abort; a push thus holds running requests like pause(keep). A paused server takes new requests, also
during a push, and lets them wait; otherwise a stale server refuses them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moerl.rollout.server.contract import PARTS, Core, EngineHealth, EngineRefuses, MemoryPart, PauseMode, Status
from moerl.rollout.server.request_table import RequestTable
from moerl.types.completion import Completion, SamplingParams
from moerl.types.errors import EngineError, EngineUnavailable, WeightError
from moerl.types.push import Manifest, Needs, TransportOffer

_DROPPED = "its weights were given up with the GPU's memory"


class ServerState:
    """The verbs of RolloutEngine and of WeightReceiver for one engine, all on its event loop."""

    def __init__(self, core: Core, *, max_running: int, version: int | None = None):
        """`version` of the weights that the engine has loaded; None: stale until a push."""
        self._max_running = max_running
        self.open(core, version)

    def open(self, core: Core, version: int | None = None) -> None:
        """The state of a server whose engine has just started."""
        self._core, self._version = core, version
        self._requests = RequestTable(core, max_running=self._max_running, may_begin=self._may_begin)
        self._stale = "no weights were pushed yet" if version is None else ""
        self._is_open = True
        self._pushing = self._is_held = False
        self._asleep: set[MemoryPart] = set()
        self._paused: PauseMode | None = None
        self._num_pauses = 0
        self._commands = asyncio.Lock()  # what changes the engine's state comes one after the other

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion:
        """Cancelled it ends the request."""
        self._check_serves(request_id)
        return await self._requests.generate(prompt_ids, sampling, request_id)

    async def abort(self, request_ids: tuple[str, ...] | None = None) -> None:
        await self._requests.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """Returns when the mode is in force; for wait: when the last running request has finished."""
        async with self._command():
            self._paused = mode
            number = await self._supersede()
            if mode == "abort":
                await self._end_running()
            await self._hold_or_release()
        if mode == "wait":
            await self._drain(number)

    async def resume(self) -> None:
        async with self._command():
            self._paused = None
            await self._supersede()
            await self._hold_or_release()

    async def sleep(self, parts: tuple[MemoryPart, ...] = PARTS) -> int:
        async with self._command():
            num_running = self._requests.num_running
            if "cache" in parts and num_running:
                reason = "their keys and values would be lost; pause(abort or wait) first"
                raise EngineError(f"sleep with {num_running} running requests: {reason}")
            if "weights" in parts and "cache" not in {*parts, *self._asleep}:
                raise EngineError("sleep of the weights alone: what is cached is of these weights, and goes with them; name the cache too")
            awake = tuple(part for part in parts if part not in self._asleep)
            self._asleep |= set(awake)
            if "weights" in awake:
                self._stale, self._version, self._pushing = _DROPPED, None, False
            await self._hold_or_release()
            return await self._core.sleep(awake) if awake else 0

    async def wake(self, parts: tuple[MemoryPart, ...] = PARTS) -> int:
        async with self._command():
            asleep = tuple(part for part in parts if part in self._asleep)
            num_bytes = await self._core.wake(asleep) if asleep else 0
            self._asleep -= set(asleep)
            await self._hold_or_release()
            return num_bytes

    async def health(self) -> EngineHealth:
        self._check_open()
        status: Status = "stale" if self._stale else "asleep" if self._asleep else "paused" if self._paused else "healthy"
        return EngineHealth(
            status=status,
            version=self._version,
            num_running=self._requests.num_running,
            num_waiting=self._requests.num_waiting,
            load=self._core.load(),
            reason=self._stale,
            asleep=tuple(sorted(self._asleep)),
        )

    async def needs(self) -> Needs:
        return await self._core.needs()

    async def connect(self, offer: TransportOffer) -> None:
        """Returns when it has a connection to the senders; nccl: when all have joined."""
        async with self._step():
            await self._core.connect(offer)

    async def begin(self, manifest: Manifest) -> None:
        if "weights" in self._asleep:
            raise WeightError("its weights are asleep: a push would have no memory to go to; wake them first")
        self._stale = f"the push of version {manifest.version} is in progress"
        self._pushing, self._version = True, None
        async with self._step():
            await self._hold_or_release()
            await self._core.begin(manifest)

    async def install(self) -> None:
        async with self._step():
            await self._core.install()

    async def finish(self, version: int, push_id: str) -> None:
        async with self._step():
            await self._core.finish(version)
            self._requests.pushed(version, push_id)
            self._version, self._stale, self._pushing = version, "", False
            await self._hold_or_release()

    async def close(self) -> None:
        """End the engine, and every request with EngineUnavailable."""
        self._shut("the server is shutting down")
        await asyncio.to_thread(self._core.close)
        await self._requests.close()

    def _check_serves(self, request_id: str) -> None:
        self._check_open()
        reason = "is asleep; wake it first" if self._asleep else ""
        if self._stale and not (self._pushing and self._paused):
            reason = f"is stale: {self._stale}; push weights first"
        if reason:
            raise EngineRefuses(f"{request_id} refused, the server {reason}")

    def _check_open(self) -> None:
        if not self._is_open:
            raise EngineUnavailable("the server is not running; start it first")

    def _may_begin(self) -> bool:
        return not (self._paused or self._stale or self._asleep)

    @asynccontextmanager
    async def _command(self) -> AsyncIterator[None]:
        async with self._commands:
            self._check_open()
            yield

    async def _supersede(self) -> int:
        """Number of the pause that begins; whoever waits for an earlier one gives up."""
        async with self._requests.changed:
            self._num_pauses += 1
            self._requests.changed.notify_all()
            return self._num_pauses

    async def _end_running(self) -> None:
        must_stay = bool(self._stale or self._asleep)  # mixed weights, or none, must not sample: such a hold ends before the requests do
        if self._is_held and not must_stay:
            await self._core.release()
            self._is_held = False
        await self._requests.end_running(waits=not must_stay)

    async def _drain(self, number: int) -> None:
        async with self._requests.changed:
            await self._requests.changed.wait_for(lambda: not self._requests.num_running or self._num_pauses != number)
        if self._num_pauses != number:
            raise EngineError("pause(wait) ended before its requests did, by another pause or resume")

    async def _hold_or_release(self) -> None:
        wants_hold = bool(self._stale or self._asleep) or self._paused in ("keep", "abort")
        if wants_hold != self._is_held:
            await (self._core.hold() if wants_hold else self._core.release())
            self._is_held = wants_hold
        self._requests.admit()

    @asynccontextmanager
    async def _step(self) -> AsyncIterator[None]:
        """A step of a push: any error leaves the server stale."""
        try:
            async with self._command():
                yield
        except EngineUnavailable as error:
            raise WeightError(str(error)) from error
        except WeightError as error:
            self._stale, self._version, self._pushing = str(error), None, False
            self._requests.fail(EngineRefuses, f"the server is stale: {error}")
            raise

    def _shut(self, reason: str) -> None:
        self._is_open = False
        self._requests.fail(EngineUnavailable, reason)
