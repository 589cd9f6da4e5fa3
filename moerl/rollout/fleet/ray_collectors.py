"""Ray actors that receive completions from rollout servers, so that what grows with their length never enters the driver.

The pool in the driver keeps the control: which server, how often, until when. For each request it calls one actor, which talks HTTP to that
server, puts the payload into the object store of its own machine, and answers with a StoredCompletion.
"""

import asyncio
import os
import pickle
import socket
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import ray

from moerl.cluster.lost_actors import LOST, memory_report, node_of, pid_of, was_killed
from moerl.cluster.run_secret import RunSecret
from moerl.rollout.fleet.collect import Answer, Intake
from moerl.rollout.server.client import BrokenConnection, HTTPEngine, generate_at, new_session
from moerl.rollout.server.tls import client_context
from moerl.rollout.server.wire import GenerateRequest
from moerl.types.errors import EngineError, MoerlError, Origin, StoreError
from moerl.types.exit_codes import ExitCode
from moerl.types.stored import StoredCompletion, keep

_DROP_THREAD = "drop"


class CollectorActor:
    """One of them. `ask` runs for as long as the server decodes, beside many others."""

    def __init__(self, secret: RunSecret, authority: Path | None):
        self._secret, self._authority = secret, authority
        self._intake: Intake | None = None
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asking: dict[int, asyncio.Task[Answer]] = {}
        self._dropped: set[int] = set()

    async def process_id(self, stored_intake: list[Any]) -> int:
        """Answers when everything is there."""
        await self._received(stored_intake)
        return os.getpid()

    async def ask(self, stored_intake: list[Any], asked: bytes, so_far: StoredCompletion | None = None) -> Answer:
        """`stored_intake`: a reference, in every call, since an actor that Ray has made again has none, and of one among the arguments that
        it is made of Ray warns. `asked`: a number of its own, url and name of the server, and the request, pickled. MoerlErrors as they
        are; BrokenConnection for what only the driver, which watches the server, can explain."""
        await self._received(stored_intake)
        number, url, server, request = pickle.loads(asked)
        self._loop = asyncio.get_running_loop()
        self._asking[number] = task = asyncio.create_task(self._answer(url, server, request, so_far))
        if number in self._dropped:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            raise EngineError(f"{server}: {request.request_id} was dropped") from None
        finally:
            del self._asking[number]
            self._dropped.discard(number)

    async def _answer(self, url: str, server: str, request: GenerateRequest, so_far: StoredCompletion | None) -> Answer:
        if self._session is None:
            self._session = new_session(self._secret, client_context(self._authority))
        session = self._session
        before = None if so_far is None else (so_far, await asyncio.to_thread(so_far.payload.get))
        assert self._intake is not None
        return await self._intake.ask(partial(generate_at, session, url, server), request, before, server=server, keep=keep)

    async def _received(self, stored_intake: list[Any]) -> None:
        if self._intake is None:
            self._intake = await stored_intake[0]

    @ray.method(concurrency_group=_DROP_THREAD)
    async def drop(self, number: int) -> None:
        """Nobody waits for it any more: the connection is closed, and the server drops the request. In another thread than `ask`, which it
        may overtake."""
        self._dropped.add(number)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel, number)

    def _cancel(self, number: int) -> None:
        if number in self._asking:
            self._asking[number].cancel()


class RayCollectors:
    """Implements Collector for HTTPEngines. Ray must be initialised."""

    def __init__(
        self, intake: Intake, *, secret: RunSecret, num_actors: int, max_in_flight: int, start_seconds: float,
        max_restarts: int = 0, authority: Path | None = None,
    ):  # fmt: skip
        """`max_in_flight`: requests of all servers together. `start_seconds`: for all actors to come. `max_restarts`: of each actor whose
        process ends. `authority`: HTTPEngine's."""
        self._intake, self._secret, self._authority = intake, secret, authority
        self._num_actors, self._max_in_flight, self._max_restarts = num_actors, max_in_flight, max_restarts
        self._start_seconds = start_seconds
        self._actors: list[Any] = []
        self._stored_intake: list[Any] = []
        self._homes: dict[HTTPEngine, Any] = {}
        self._numbers = count()

    async def start(self) -> None:
        # Spread over machines: the payloads fill the store of the machine that receives them.
        options: dict[str, Any] = dict(num_cpus=0, max_concurrency=self._max_in_flight, scheduling_strategy="SPREAD")
        # Of one that ends Ray makes another, and asks it what it was asked. What it had received is lost: see moerl.types.stored.
        options |= dict(max_restarts=self._max_restarts, max_task_retries=self._max_restarts)
        actor = ray.remote(concurrency_groups={_DROP_THREAD: 1}, **options)(CollectorActor)
        self._stored_intake = [ray.put(self._intake)]  # as long as an actor may be made again
        self._actors = [actor.remote(self._secret, self._authority) for _ in range(self._num_actors)]
        try:
            async with asyncio.timeout(self._start_seconds):
                await asyncio.gather(*(actor.process_id.remote(self._stored_intake) for actor in self._actors))
        except TimeoutError as error:
            raise _late(self._start_seconds, self._num_actors) from error
        except LOST as error:
            raise _lost(error) from error

    async def ask(self, engine: HTTPEngine, request: GenerateRequest, so_far: StoredCompletion | None) -> Answer:
        actor = self._homes.setdefault(engine, self._actors[len(self._homes) % len(self._actors)])
        # Ray serializes argument by argument with cloudpickle: four of them cost the driver 0.1 ms more.
        number = next(self._numbers)
        stored, asked = self._stored_intake, pickle.dumps((number, engine.url, engine.name, request))
        try:
            answer: Answer = await (actor.ask.remote(stored, asked) if so_far is None else actor.ask.remote(stored, asked, so_far))
        except asyncio.CancelledError:
            actor.drop.remote(number)
            raise
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, BrokenConnection):
                raise await engine.explain(error.cause) from None
            if isinstance(error.cause, MoerlError):
                raise error.cause from None
            raise
        except LOST as error:
            raise _lost(error) from error
        return answer

    async def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._homes, self._stored_intake = [], {}, []


def _late(seconds: float, num_actors: int) -> StoreError:
    late = StoreError(
        f"deadlines.start_seconds = {seconds:g}: not all of rollout.num_collectors = {num_actors} processes that receive completions have "
        "started\n    why: Ray has not made them, or one of them hangs; their logs are in /tmp/ray/session_latest/logs\n"
        "    fix: the same command goes on; a larger deadlines.start_seconds if they were only slow"
    )
    late.exit_code = ExitCode.KILLED
    return late


def _lost(error: ray.exceptions.RayError) -> StoreError:
    """Error that says what goes with a collector, and why it ended."""
    is_memory = isinstance(error, ray.exceptions.OutOfMemoryError)
    if is_memory:
        why = "\n".join(memory_report(error))
    elif was_killed(error):
        why = f"its process {pid_of(error)} died without a Python error"
    else:
        why = str(error)
    lost = StoreError(
        f"a process that receives completions ended, and the samples it had received with it: {why}\nThe newest checkpoint has everything "
        "to go on from; the same command resumes"
    )
    if was_killed(error):
        lost.exit_code = ExitCode.KILLED
    node = node_of(error) if is_memory else socket.gethostname()
    return lost.began_in(Origin(who="a process that receives completions", node=node, doing="", details=str(error)))
