"""The state of a server around an engine: which requests run and which wait, paused, asleep, stale; how a push goes.

Same rules as moerl.rollout.engines.hf.hf_worker. Engines' own pauses differ, so requests that must wait are kept here and an engine only
ever has `max_running`: it is held (Core.hold) while the server is pushed to, stale, or paused in mode keep or abort.
"""

import asyncio
import math
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any, Literal, TypeVar

from moerl.rollout.server.asleep import push_refusal, sleep_refusal
from moerl.rollout.server.contract import EngineHealth, MemoryPart, PauseMode
from moerl.rollout.server.engine_core import Core, Sampled, ServerRequest
from moerl.types.completion import Completion
from moerl.types.errors import EngineError, EngineUnavailable, WeightError
from moerl.types.push import Manifest, Needs, TransportOffer

T = TypeVar("T")


@dataclass(eq=False, slots=True, kw_only=True)
class _Held:
    """A request in flight."""

    request: ServerRequest
    key: str
    """The engine's name for it."""
    task: "asyncio.Task[None] | None" = field(default=None)
    """None while it waits."""


class Gate:
    """Public methods are safe from any thread and return at once; a Future reports the end, or the error."""

    def __init__(self, core: Core, *, max_running: int, loop: asyncio.AbstractEventLoop):
        """`loop`: of the engine; everything runs there."""
        self._core, self._max_running, self._loop = core, max_running, loop
        self._requests: dict[str, _Held] = {}
        self._keys = count()
        self._version: int | None = None
        self._stale = "no weights were pushed yet"
        self._pushing = self._is_held = self._closing = False
        self._asleep: set[MemoryPart] = set()
        self._paused: PauseMode | None = None
        self._num_pauses = self._num_pushes = 0
        self._changed = asyncio.Condition()
        self._commands = asyncio.Lock()  # what changes the engine's state comes one after the other

    def generate(self, request: ServerRequest) -> None:
        """The outcome goes to request.done, also a refusal."""
        self._loop.call_soon_threadsafe(self._accept, request)

    def abort(self, request_ids: tuple[str, ...] | None) -> "Future[None]":
        return self._submit(self._abort(request_ids))

    def pause(self, mode: PauseMode) -> "Future[None]":
        """Done when the mode is in force; for wait: when the last running request has finished."""
        return self._submit(self._pause(mode))

    def resume(self) -> "Future[None]":
        return self._submit(self._resume())

    def sleep(self, parts: tuple[MemoryPart, ...]) -> "Future[int]":
        return self._submit(self._sleep(parts))

    def wake(self, parts: tuple[MemoryPart, ...]) -> "Future[int]":
        return self._submit(self._wake(parts))

    def needs(self) -> Needs:
        return self._core.needs()

    def connect(self, offer: TransportOffer) -> None:
        """Blocks until it has a connection to the senders; nccl: until all have joined."""
        self._submit(self._step(self._core.connect(offer))).result()

    def begin(self, manifest: Manifest) -> "Future[None]":
        return self._submit(self._begin(manifest))

    def install(self) -> "Future[None]":
        return self._submit(self._step(self._core.install()))

    def finish(self, version: int) -> "Future[None]":
        return self._submit(self._finish(version))

    def health(self) -> EngineHealth:
        status: Literal["stale", "asleep", "paused", "healthy"] = (
            "stale" if self._stale else "asleep" if self._asleep else "paused" if self._paused else "healthy"
        )
        running = len(self._running())
        return EngineHealth(
            status=status,
            version=self._version,
            num_running=running,
            num_waiting=len(self._requests) - running,
            reason=self._stale,
            asleep=tuple(sorted(self._asleep)),
        )

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._fail, "the server is shutting down")
        self._core.close()

    # -- requests, on the loop ---------------------------------------------------------------------------------

    def _accept(self, request: ServerRequest) -> None:
        reason = "is asleep; wake it first" if self._asleep else ""
        if self._stale and not (self._pushing and self._paused):
            reason = f"is stale: {self._stale}; push weights first"
        if reason:
            request.done(EngineUnavailable(f"{request.request_id} refused, the server {reason}"))
            return
        if request.request_id in self._requests:
            request.done(EngineError(f"request_id = {request.request_id!r}: is in flight already; ids must be unique on a server"))
            return
        # Fixed width: SGLang aborts by prefix.
        self._requests[request.request_id] = _Held(request=request, key=f"{next(self._keys):016x}")
        self._admit()

    def _admit(self) -> None:
        if self._paused or self._stale or self._asleep:
            return
        waiting = [held for held in self._requests.values() if held.task is None]
        for held in waiting[: max(self._max_running - len(self._running()), 0)]:
            held.task = self._loop.create_task(self._run(held))

    async def _run(self, held: _Held) -> None:
        request = held.request
        try:
            prompt_ids = [int(token) for token in request.prompt_ids]
            sampled = await self._core.generate(held.key, prompt_ids, request.sampling, f"push-{self._num_pushes}")
            self._end(held, _sound(request, sampled))
        except EngineError as error:
            self._end(held, error)
        except Exception as error:  # a bug of the engine or of its adapter: the request must not wait for ever
            self._end(held, EngineError(f"{request.request_id}: the engine failed: {type(error).__name__}: {error}"))
        self._admit()
        async with self._changed:
            self._changed.notify_all()

    def _end(self, held: _Held, outcome: Completion | EngineError) -> None:
        """Nothing if it has ended already."""
        if self._requests.get(held.request.request_id) is held:
            del self._requests[held.request.request_id]
            held.request.done(outcome)

    def _running(self) -> list[_Held]:
        return [held for held in self._requests.values() if held.task is not None]

    async def _abort(self, request_ids: Iterable[str] | None) -> None:
        names = self._requests if request_ids is None else request_ids
        chosen = [self._requests[name] for name in names if name in self._requests]
        for held in chosen:  # before those that run, which would make room for them
            if held.task is None:
                empty = Completion(request_id=held.request.request_id, token_ids=(), logprobs=(), spans=(), finish_reason="abort")
                self._end(held, empty)
        await asyncio.gather(*(self._core.abort(held.key) for held in chosen if held.task is not None))

    def _fail(self, reason: str) -> None:
        for held in list(self._requests.values()):
            if held.task is not None:
                self._loop.create_task(self._core.abort(held.key))  # nobody waits for it
            self._end(held, EngineUnavailable(f"{held.request.request_id}: {reason}"))

    # -- state, on the loop ------------------------------------------------------------------------------------

    async def _pause(self, mode: PauseMode) -> None:
        async with self._commands:
            self._paused = mode
            number = await self._supersede()
            if mode == "abort":
                await self._end_running()
            await self._hold_or_release()
        if mode == "wait":
            await self._drain(number)

    async def _resume(self) -> None:
        async with self._commands:
            self._paused = None
            await self._supersede()
            await self._hold_or_release()

    async def _supersede(self) -> int:
        """Whoever waits for an earlier pause gives up."""
        async with self._changed:
            self._num_pauses += 1
            self._changed.notify_all()
            return self._num_pauses

    async def _end_running(self) -> None:
        if self._stale:
            return  # nothing runs, or the push in progress holds it: mixed weights must not sample
        if self._is_held:
            await self._core.release()
            self._is_held = False
        running = self._running()
        await self._abort([held.request.request_id for held in running])
        await asyncio.gather(*(held.task for held in running if held.task is not None))

    async def _drain(self, number: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._running() or self._num_pauses != number)
        if self._num_pauses != number:
            raise EngineError("pause(wait) ended before its requests did, by another pause or resume")

    async def _hold_or_release(self) -> None:
        wants_hold = bool(self._stale) or self._paused in ("keep", "abort")
        if wants_hold != self._is_held:
            await (self._core.hold() if wants_hold else self._core.release())
            self._is_held = wants_hold
        self._admit()

    async def _sleep(self, parts: tuple[MemoryPart, ...]) -> int:
        async with self._commands:
            if reason := sleep_refusal(parts, len(self._running())):
                raise EngineError(reason)
            awake = tuple(part for part in parts if part not in self._asleep)
            num_bytes = await self._core.sleep(awake) if awake else 0
            self._asleep |= set(awake)
            return num_bytes

    async def _wake(self, parts: tuple[MemoryPart, ...]) -> int:
        async with self._commands:
            asleep = tuple(part for part in parts if part in self._asleep)
            num_bytes = await self._core.wake(asleep) if asleep else 0
            self._asleep -= set(asleep)
            self._admit()
            return num_bytes

    async def _begin(self, manifest: Manifest) -> None:
        if reason := push_refusal(self._asleep):
            raise WeightError(reason)
        self._stale = f"the push of version {manifest.version} is in progress"
        self._pushing, self._version = True, None
        async with self._commands:
            await self._hold_or_release()
        await self._step(self._core.begin(manifest))

    async def _finish(self, version: int) -> None:
        await self._step(self._core.finish(version))
        self._version, self._stale, self._pushing = version, "", False
        self._num_pushes += 1
        async with self._commands:
            await self._hold_or_release()

    async def _step(self, call: Coroutine[Any, Any, None]) -> None:
        """Of a push: any error leaves the server stale."""
        try:
            async with self._commands:
                await call
        except WeightError as error:
            self._stale, self._version, self._pushing = str(error), None, False
            self._fail(f"the server is stale: {error}")
            raise

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


def _sound(request: ServerRequest, sampled: Sampled) -> Completion | EngineError:
    """The completion; an error where a log-prob is no finite number."""
    position = next((at for at, logprob in enumerate(sampled.logprobs) if not math.isfinite(logprob)), None)
    if position is not None:
        ends = accumulate(span.num_tokens for span in sampled.spans)
        version = next(span.version for span, end in zip(sampled.spans, ends, strict=True) if position < end)
        reason = f"log-probs at response position {position} are not finite with weights of version {version}: the training has diverged"
        return EngineError(f"{request.request_id}: {reason}")
    return Completion(
        request_id=request.request_id,
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        spans=sampled.spans,
        finish_reason=sampled.finish_reason,
        routes=sampled.routes,
    )
