"""A transformers model in this process.

A thread of its own, the generation thread, owns the model and everything that runs on it. The event loop hands it commands, which it runs
between iterations, so nothing changes under a forward pass and nothing needs a lock.

    commands --inbox--> [all commands] -> [one iteration, if there is work and nothing holds it] -> [what has ended --> event loop] -> ...

Requests that come in one turn of the event loop are one command, and those that end in one iteration are told in one turn: a group that
leaves together is followed by a group that is admitted together, and so shares the computation of its prompt.
"""

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec, TypeVar

import numpy as np
import torch

from moerl.rollout.engines.dropped_weights import DroppedWeights
from moerl.rollout.engines.hf.scheduler import Scheduler, SlotRequest
from moerl.rollout.server.contract import Core, MemoryPart
from moerl.types.completion import Completion, SamplingParams, ServerLoad
from moerl.types.errors import EngineError, WeightError
from moerl.types.push import Manifest, Needs, TransportOffer
from moerl.weights.push_calls import in_thread
from moerl.weights.weight_session import WeightSession

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class HFCore(Core):
    """Made on its event loop. It runs on CPU: weights asleep give host memory back, and a cache stays where it is."""

    def __init__(self, scheduler: Scheduler, session: WeightSession, weights: Collection[torch.Tensor], *, version: int | None):
        """`weights`: all that a push brings, as the model has it. `version` of those that are loaded."""
        self._scheduler, self._session, self._version = scheduler, session, version
        self._weights = weights
        self._dropped: DroppedWeights | None = None
        self._loop = asyncio.get_running_loop()
        self._arrivals: list[SlotRequest] = []
        self._ended: list[tuple[asyncio.Future[Completion], Completion | Exception]] = []
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_held = self._closing = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    async def generate(self, key: str, prompt_ids: list[int], sampling: SamplingParams, salt: str) -> Completion:
        """Nothing that one push left is used after the next: only requests that have not begun share a prompt."""
        outcome: asyncio.Future[Completion] = self._loop.create_future()

        def done(result: Completion | Exception) -> None:
            self._ended.append((outcome, result))

        if not self._arrivals:
            self._loop.call_soon(self._hand_over)
        self._arrivals.append(SlotRequest(key=key, prompt_ids=np.array(prompt_ids, dtype=np.int64), sampling=sampling, done=done))
        return await outcome

    async def abort(self, key: str) -> None:
        self._hand_over()
        await self._on_thread(self._scheduler.abort, key)

    def load(self) -> ServerLoad:
        """It never preempts: every slot has room for the longest request."""
        return ServerLoad(cache_share=self._scheduler.cache_share)

    async def hold(self) -> None:
        await self._on_thread(self._set_held, True)

    async def release(self) -> None:
        await self._on_thread(self._set_held, False)

    async def sleep(self, parts: tuple[MemoryPart, ...]) -> int:
        return await self._on_thread(self._drop) if "weights" in parts else 0

    async def wake(self, parts: tuple[MemoryPart, ...]) -> int:
        return await self._on_thread(self._take) if "weights" in parts else 0

    async def needs(self) -> Needs:
        return (self._session.needs,)

    async def connect(self, offer: TransportOffer) -> None:
        """Off the generation thread: it may wait for others, and does not touch the model."""
        await in_thread(self._session.connect, offer)

    async def begin(self, manifest: Manifest) -> None:
        await self._on_thread(self._session.begin, manifest)

    async def install(self) -> None:
        await self._on_thread(self._session.install)

    async def finish(self, version: int) -> None:
        await self._on_thread(self._finish, version)

    def close(self) -> None:
        """End the thread after its current iteration."""
        self._inbox.put(self._stop)
        self._thread.join()

    def _hand_over(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        if arrivals:
            self._inbox.put(partial(self._scheduler.add, arrivals))

    async def _on_thread(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Its EngineError or WeightError goes to the caller; any other error is a bug and ends the server."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **options))
            except (EngineError, WeightError) as error:
                future.set_exception(error)

        self._inbox.put(command)
        return await asyncio.wrap_future(future)

    # -- on the generation thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._run_commands()
                if self._has_work():
                    assert self._version is not None
                    self._scheduler.step(self._version)
                if self._ended:
                    ended, self._ended = self._ended, []
                    self._loop.call_soon_threadsafe(_deliver, ended)
        except BaseException:
            logger.exception("the generation thread failed")
            os._exit(1)

    def _run_commands(self) -> None:
        """All that wait; with nothing to iterate on, at least one."""
        if not self._has_work():
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _has_work(self) -> bool:
        return not self._is_held and self._scheduler.has_work

    def _set_held(self, is_held: bool) -> None:
        self._is_held = is_held

    def _drop(self) -> int:
        self._dropped = DroppedWeights(self._weights)
        return self._dropped.num_bytes

    def _take(self) -> int:
        assert self._dropped is not None, "the gate wakes what sleeps"
        dropped, self._dropped = self._dropped, None
        dropped.restore()
        return dropped.num_bytes

    def _finish(self, version: int) -> None:
        self._session.finish(version)
        self._version = version

    def _stop(self) -> None:
        self._closing = True
        self._session.close()


def _deliver(ended: list[tuple["asyncio.Future[Completion]", Completion | Exception]]) -> None:
    for outcome, result in ended:
        if outcome.done():
            continue
        if isinstance(result, Exception):
            outcome.set_exception(result)
        else:
            outcome.set_result(result)
