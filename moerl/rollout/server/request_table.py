"""Requests of a server: which run on its engine and which wait for it, and how each ends.

An engine only ever has `max_running`; the others wait here. The state above (server_state.py) says when requests may begin.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import Any

from moerl.rollout.server.contract import Core
from moerl.types.completion import Completion, SamplingParams
from moerl.types.errors import EngineError

logger = logging.getLogger(__name__)


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


class RequestTable:
    """Requests in flight of one engine, all on its event loop."""

    def __init__(self, core: Core, *, max_running: int, may_begin: Callable[[], bool]):
        self._core, self._max_running, self._may_begin = core, max_running, may_begin
        self._held: dict[str, _Held] = {}
        self._running: dict[str, _Held] = {}
        self._waiting: tuple[OrderedDict[str, _Held], OrderedDict[str, _Held]] = (OrderedDict(), OrderedDict())
        """By key, those that go first and the others. Whoever ends or begins must cost the same however many there are; to find the first
        of a plain dict, from whose front many were taken, does not."""
        self._keys = count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_pushes = 0
        self._push_ids: dict[int, str] = {}
        self.changed = asyncio.Condition()
        """Notified when one has ended, and by the state when a pause ends or another begins."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting))

    def pushed(self, version: int, push_id: str) -> None:
        """Weights of `version` have come: what was cached before is of others, and its spans name the push that brought it."""
        self._push_ids[version] = push_id
        self._num_pushes += 1

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion:
        """Cancelled it ends the request. One of the same name that is in flight ends with the tokens it has: whoever asked for it has lost
        its answer, or is about to say that it wants none."""
        if (older := self._held.get(request_id)) is not None:
            self._set_aside([older])
            self._spawn(self._end_early([older]))
        held = self._held[request_id] = _Held(
            request_id=request_id,
            prompt_ids=[int(token) for token in prompt_ids],
            sampling=sampling,
            key=f"{next(self._keys):016x}",  # of fixed width: SGLang aborts by prefix
            outcome=asyncio.get_running_loop().create_future(),
            name=request_id,
        )
        self._waiting[0 if sampling.goes_first else 1][held.key] = held
        self.admit()
        try:
            return await held.outcome
        except asyncio.CancelledError:
            if held.task is None:
                self._end(held, _nothing(held))
            else:
                self._set_aside([held])
                self._spawn(self._end_early([held]))
            raise

    async def abort(self, request_ids: tuple[str, ...] | None = None) -> None:
        """Those of these names end with the tokens they have; None: all."""
        names = self._held if request_ids is None else request_ids
        chosen = [self._held[name] for name in names if name in self._held]
        if request_ids is not None:
            self._set_aside(chosen)
        await self._end_early(chosen)

    def admit(self) -> None:
        """Requests that wait begin, as far as there is room."""
        while self._may_begin() and len(self._running) < self._max_running and (queue := self._waiting[0] or self._waiting[1]):
            key, held = queue.popitem(last=False)
            if held.outcome.cancelled():  # whoever asked has gone, and is about to say so
                continue
            self._running[key] = held
            held.task = self._spawn(self._run(held))

    async def end_running(self, *, waits: bool) -> None:
        """Those that run end with the tokens they have; `waits`: returns when the engine has let go of them."""
        running = list(self._running.values())
        await self._end_early(running)
        if waits:
            await asyncio.gather(*(held.task for held in running if held.task is not None))

    async def _end_early(self, chosen: Iterable[_Held]) -> None:
        """Requests end with the tokens they have."""
        running = [held for held in chosen if held.task is not None]
        for held in chosen:  # before those that run, which would make room for them
            if held.task is None:
                self._end(held, _nothing(held))
        if running:
            await asyncio.sleep(0)  # tasks made in this turn have not called the engine yet
            await asyncio.gather(*(self._core.abort(held.key) for held in running))

    def fail(self, error: Callable[[str], EngineError], reason: str) -> None:
        """All end with this error."""
        for held in list(self._held.values()):
            if held.task is not None:
                self._spawn(self._core.abort(held.key))  # nobody waits for it
            self._end(held, error(f"{held.request_id}: {reason}"))

    async def close(self) -> None:
        """The engine has ended."""
        left = list(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1)  # an engine that was ended may not let go

    async def _run(self, held: _Held) -> None:
        try:
            completion = await self._core.generate(held.key, held.prompt_ids, held.sampling, f"push-{self._num_pushes}")
            spans = tuple(replace(span, push_id=self._push_ids.get(span.version, "")) for span in completion.spans)
            self._end(held, _sound(replace(completion, request_id=held.request_id, spans=spans, load=self._core.load())))
        except EngineError as error:
            self._end(held, error)
        except Exception as error:  # a bug of the engine or of its adapter: the request must not wait for ever
            logger.exception("%s: the engine failed", held.request_id)  # its place is told nowhere else
            self._end(held, EngineError(f"{held.request_id}: the engine failed: {type(error).__name__}: {error}"))
        self.admit()
        async with self.changed:
            self.changed.notify_all()

    def _end(self, held: _Held, outcome: Completion | EngineError) -> None:
        """Nothing if it has ended already."""
        if self._held.get(held.name) is not held:
            return
        del self._held[held.name]
        for kept in (self._running, *self._waiting):
            kept.pop(held.key, None)
        if held.outcome.done():  # whoever asked has gone
            return
        if isinstance(outcome, EngineError):
            held.outcome.set_exception(outcome)
        else:
            held.outcome.set_result(outcome)

    def _set_aside(self, chosen: Iterable[_Held]) -> None:
        """Their ids are free at once: a group that was put off may begin anew before the engine has ended it."""
        for held in chosen:
            if self._held.get(held.name) is held:
                del self._held[held.name]
                held.name = held.key
                self._held[held.name] = held

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _nothing(held: _Held) -> Completion:
    return Completion(request_id=held.request_id, token_ids=(), logprobs=(), spans=(), finish_reason="abort")


def _sound(completion: Completion) -> Completion | EngineError:
    """An error where a log-prob is no finite number."""
    position = next((at for at, logprob in enumerate(completion.logprobs) if not math.isfinite(logprob)), None)
    if position is None:
        return completion
    ends = accumulate(span.num_tokens for span in completion.spans)
    version = next(span.version for span, end in zip(completion.spans, ends, strict=True) if position < end)
    reason = f"log-probs at response position {position} are not finite with weights of version {version}: the training has diverged"
    return EngineError(f"{completion.request_id}: {reason}")
