"""The state of a server around an engine: which requests run and which wait, paused, asleep, stale; how a push goes.

Engines' own pauses differ, so requests that must wait are kept here and an engine only ever has `max_running`. It is held (Core.hold) while
the server is stale, asleep, or paused in mode keep or abort; a push thus holds running requests like pause(keep). A paused server takes new
requests, also during a push, and lets them wait; otherwise a stale server refuses them.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import Any

from moerl.rollout.server.contract import PARTS, Core, EngineHealth, EngineRefuses, MemoryPart, PauseMode, Status
from moerl.types.completion import Completion, SamplingParams
from moerl.types.errors import EngineError, EngineUnavailable, WeightError
from moerl.types.push import Manifest, Needs, TransportOffer

_DROPPED = "its weights were given up with the GPU's memory"


@dataclass(eq=False, slots=True, kw_only=True)
class _Held:
    """A request in flight."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    key: str
    """The engine's name for it."""
    outcome: "asyncio.Future[Completion]"
    name: str
    """Key by which it is found: its id, until somebody ends it."""
    task: "asyncio.Task[None] | None" = field(default=None)
    """None while it waits."""


class ServerState:
    """The verbs of RolloutEngine and of WeightReceiver for one engine, all on its event loop."""

    def __init__(self, core: Core, *, max_running: int, version: int | None = None):
        """`version` of the weights that the engine has loaded; None: stale until a push."""
        self._max_running = max_running
        self._keys = count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.open(core, version)

    def open(self, core: Core, version: int | None = None) -> None:
        """The state of a server whose engine has just started."""
        self._core, self._version = core, version
        self._requests: dict[str, _Held] = {}
        self._stale = "no weights were pushed yet" if version is None else ""
        self._push_ids: dict[int, str] = {}
        self._is_open = True
        self._pushing = self._is_held = False
        self._asleep: set[MemoryPart] = set()
        self._paused: PauseMode | None = None
        self._num_pauses = self._num_pushes = 0
        self._changed = asyncio.Condition()
        self._commands = asyncio.Lock()  # what changes the engine's state comes one after the other

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion:
        """Cancelled it ends the request."""
        self._check_serves(request_id)
        held = self._requests[request_id] = _Held(
            request_id=request_id,
            prompt_ids=[int(token) for token in prompt_ids],
            sampling=sampling,
            key=f"{next(self._keys):016x}",  # of fixed width: SGLang aborts by prefix
            outcome=asyncio.get_running_loop().create_future(),
            name=request_id,
        )
        self._admit()
        try:
            return await held.outcome
        except asyncio.CancelledError:
            self._set_aside([held])
            self._spawn(self._end_early([held]))
            raise

    async def abort(self, request_ids: tuple[str, ...] | None = None) -> None:
        names = self._requests if request_ids is None else request_ids
        chosen = [self._requests[name] for name in names if name in self._requests]
        if request_ids is not None:
            self._set_aside(chosen)
        await self._end_early(chosen)

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
            num_running = len(self._running())
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
        running = len(self._running())
        return EngineHealth(
            status=status,
            version=self._version,
            num_running=running,
            num_waiting=len(self._requests) - running,
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
            self._push_ids[version] = push_id
            self._version, self._stale, self._pushing = version, "", False
            self._num_pushes += 1
            await self._hold_or_release()

    async def close(self) -> None:
        """End the engine, and every request with EngineUnavailable."""
        self._shut("the server is shutting down")
        await asyncio.to_thread(self._core.close)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1)  # an engine that was ended may not let go

    # -- requests ----------------------------------------------------------------------------------------------

    def _check_serves(self, request_id: str) -> None:
        self._check_open()
        reason = "is asleep; wake it first" if self._asleep else ""
        if self._stale and not (self._pushing and self._paused):
            reason = f"is stale: {self._stale}; push weights first"
        if reason:
            raise EngineRefuses(f"{request_id} refused, the server {reason}")
        if request_id in self._requests:
            raise EngineError(f"request_id = {request_id!r}: is in flight already; ids must be unique on a server")

    def _check_open(self) -> None:
        if not self._is_open:
            raise EngineUnavailable("the server is not running; start it first")

    def _admit(self) -> None:
        if self._paused or self._stale or self._asleep:
            return
        waiting = [held for held in self._requests.values() if held.task is None]
        waiting.sort(key=lambda held: not held.sampling.goes_first)
        for held in waiting[: max(self._max_running - len(self._running()), 0)]:
            held.task = self._spawn(self._run(held))

    async def _run(self, held: _Held) -> None:
        try:
            completion = await self._core.generate(held.key, held.prompt_ids, held.sampling, f"push-{self._num_pushes}")
            spans = tuple(replace(span, push_id=self._push_ids.get(span.version, "")) for span in completion.spans)
            self._end(held, _sound(replace(completion, request_id=held.request_id, spans=spans, load=self._core.load())))
        except EngineError as error:
            self._end(held, error)
        except Exception as error:  # a bug of the engine or of its adapter: the request must not wait for ever
            self._end(held, EngineError(f"{held.request_id}: the engine failed: {type(error).__name__}: {error}"))
        self._admit()
        async with self._changed:
            self._changed.notify_all()

    def _end(self, held: _Held, outcome: Completion | EngineError) -> None:
        """Nothing if it has ended already."""
        if self._requests.get(held.name) is not held:
            return
        del self._requests[held.name]
        if held.outcome.done():  # whoever asked has gone
            return
        if isinstance(outcome, EngineError):
            held.outcome.set_exception(outcome)
        else:
            held.outcome.set_result(outcome)

    def _set_aside(self, chosen: Iterable[_Held]) -> None:
        """Their ids are free at once: a group that was put off may begin anew before the engine has ended it."""
        for held in chosen:
            if self._requests.get(held.name) is held:
                del self._requests[held.name]
                held.name = held.key
                self._requests[held.name] = held

    def _running(self) -> list[_Held]:
        return [held for held in self._requests.values() if held.task is not None]

    async def _end_early(self, chosen: Iterable[_Held]) -> None:
        """Requests end with the tokens they have."""
        running = [held for held in chosen if held.task is not None]
        for held in chosen:  # before those that run, which would make room for them
            if held.task is None:
                self._end(held, Completion(request_id=held.request_id, token_ids=(), logprobs=(), spans=(), finish_reason="abort"))
        if running:
            await asyncio.sleep(0)  # tasks made in this turn have not called the engine yet
            await asyncio.gather(*(self._core.abort(held.key) for held in running))

    def _fail(self, error: Callable[[str], EngineError], reason: str) -> None:
        for held in list(self._requests.values()):
            if held.task is not None:
                self._spawn(self._core.abort(held.key))  # nobody waits for it
            self._end(held, error(f"{held.request_id}: {reason}"))

    # -- state -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _command(self) -> AsyncIterator[None]:
        async with self._commands:
            self._check_open()
            yield

    async def _supersede(self) -> int:
        """Number of the pause that begins; whoever waits for an earlier one gives up."""
        async with self._changed:
            self._num_pauses += 1
            self._changed.notify_all()
            return self._num_pauses

    async def _end_running(self) -> None:
        running = self._running()
        must_stay = bool(self._stale or self._asleep)  # mixed weights, or none, must not sample: such a hold ends before the requests do
        if self._is_held and not must_stay:
            await self._core.release()
            self._is_held = False
        await self._end_early(running)
        if not must_stay:
            await asyncio.gather(*(held.task for held in running if held.task is not None))

    async def _drain(self, number: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._running() or self._num_pauses != number)
        if self._num_pauses != number:
            raise EngineError("pause(wait) ended before its requests did, by another pause or resume")

    async def _hold_or_release(self) -> None:
        wants_hold = bool(self._stale or self._asleep) or self._paused in ("keep", "abort")
        if wants_hold != self._is_held:
            await (self._core.hold() if wants_hold else self._core.release())
            self._is_held = wants_hold
        self._admit()

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
            self._fail(EngineRefuses, f"the server is stale: {error}")
            raise

    def _shut(self, reason: str) -> None:
        self._is_open = False
        self._fail(EngineUnavailable, reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _sound(completion: Completion) -> Completion | EngineError:
    """An error where a log-prob is no finite number."""
    position = next((at for at, logprob in enumerate(completion.logprobs) if not math.isfinite(logprob)), None)
    if position is None:
        return completion
    ends = accumulate(span.num_tokens for span in completion.spans)
    version = next(span.version for span, end in zip(completion.spans, ends, strict=True) if position < end)
    reason = f"log-probs at response position {position} are not finite with weights of version {version}: the training has diverged"
    return EngineError(f"{completion.request_id}: {reason}")
