"""Ray actors that receive completions from rollout servers, so that what grows with their length never enters the driver.

The pool in the driver keeps the control: which server, how often, until when. Requests that it makes in one turn of the event loop go to an
actor (collector_actor.py) in one call, which talks HTTP to the server; their answers come back, as many at a time as are there, by another
call, which this process always has open.
"""

import asyncio
import pickle
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from pathlib import Path
from typing import Any

import ray

from moerl.cluster.forks.local_ray import ray_folder
from moerl.cluster.lost_actors import LOST, memory_report, node_of, pid_of, was_killed
from moerl.cluster.ray_nodes import only_on
from moerl.cluster.run_secret import RunSecret
from moerl.hangs.watched import ProcessId, WatchedProcess
from moerl.rollout.fleet.collector import Answer, Intake
from moerl.rollout.fleet.collector_actor import CollectorActor, unpacked
from moerl.rollout.server.client import BrokenConnection, HTTPEngine
from moerl.rollout.server.messages import dump_requests, messages_of
from moerl.rollout.server.wire import GenerateRequest
from moerl.types.errors import MoerlError, Origin, StoreError
from moerl.types.exit_codes import ExitCode
from moerl.types.stored import StoredCompletion

_LEAVE_SECONDS = 2.0
"""Time that the actors have to answer before they are killed."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Waiting:
    """A request that has no answer yet."""

    engine: HTTPEngine
    request: GenerateRequest
    so_far: StoredCompletion | None
    answer: "asyncio.Future[Answer]"


@dataclass(eq=False, slots=True, kw_only=True)
class _Home:
    """An actor, and what is asked of it."""

    actor: Any
    node: str | None
    life: str
    host: str
    process: ProcessId
    waiting: dict[int, _Waiting] = field(default_factory=dict)
    new: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    failure: Exception | None = None
    """Why it answers no more."""


class RayCollectors:
    """Implements Collector for HTTPEngines. Ray must be initialised."""

    def __init__(
        self, intake: Intake, *, secret: RunSecret, num_actors: int, start_seconds: float, max_restarts: int = 0,
        authority: Path | None = None, nodes: Sequence[str] = (), per_server: int = 1,
    ):  # fmt: skip
        """`nodes`: ids of those with servers, which get actors in turns; none: Ray spreads them. `per_server`: actors that share what a
        server says. `start_seconds`: for all actors to come.
        `max_restarts`: of each actor whose process ends. `authority`: HTTPEngine's."""
        self._intake, self._secret, self._authority = intake, secret, authority
        self._num_actors, self._max_restarts, self._start_seconds = num_actors, max_restarts, start_seconds
        self._per_server = per_server
        self._nodes: list[str | None] = [nodes[number % len(nodes)] if nodes else None for number in range(num_actors)]
        self._actors: list[Any] = []
        self._stored_intake: list[Any] = []
        self._homes: list[_Home] = []
        self._homes_of: dict[HTTPEngine, list[_Home]] = {}
        self._newest: dict[HTTPEngine, tuple[tuple[int, ...], _Home]] = {}  # prompt, and where its requests are
        self._listeners: list[asyncio.Task[None]] = []
        self._numbers = count()
        self._is_closing = False

    async def start(self) -> None:
        # Of one that ends Ray makes another, and asks it for answers. What it had received is lost: see moerl.types.stored.
        actor = ray.remote(num_cpus=0, max_restarts=self._max_restarts, max_task_retries=self._max_restarts)(CollectorActor)
        self._stored_intake = [ray.put(self._intake)]  # as long as an actor may be made again
        # The payloads fill the store of the machine that receives them. Without a node: spread over all. Of actors that ask for no
        # resource, Ray 2.60 puts one with a soft affinity wherever it asks first.
        where = ["SPREAD" if node is None else only_on(node) for node in self._nodes]
        self._actors = [actor.options(scheduling_strategy=each).remote(self._secret, self._authority) for each in where]
        try:
            async with asyncio.timeout(self._start_seconds):
                begun = await asyncio.gather(*(actor.begin.remote(self._stored_intake) for actor in self._actors))
        except TimeoutError as error:
            raise _late(self._start_seconds, self._num_actors) from error
        except LOST as error:
            raise _lost(error) from error
        self._homes = [
            _Home(actor=actor, node=node, life=life, host=host, process=process)
            for actor, node, (life, host, process) in zip(self._actors, self._nodes, begun, strict=True)
        ]
        self._listeners = [asyncio.create_task(self._listen(home)) for home in self._homes]

    async def ask(self, engine: HTTPEngine, request: GenerateRequest, so_far: StoredCompletion | None) -> Answer:
        home = self._home(engine, request.prompt_ids)
        if home.failure is not None:
            raise _told(home.failure)
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        waiting = home.waiting[number] = _Waiting(engine=engine, request=request, so_far=so_far, answer=loop.create_future())
        if not home.new:
            loop.call_soon(self._submit_new, home)
        home.new.append(number)
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            if home.waiting.pop(number, None) is not None:
                self._drop(home, number)
            raise
        except BrokenConnection as error:
            raise await engine.explain(error) from None

    def _home(self, engine: HTTPEngine, prompt_ids: tuple[int, ...]) -> _Home:
        """The requests of a prompt, which comes with them once, stay together; the next prompt goes where the fewest wait."""
        homes = self._homes_of.get(engine) or self._new_homes(engine)
        prompt, home = self._newest.get(engine, ((), homes[0]))
        if prompt is not prompt_ids:
            home = min(homes, key=lambda each: len(each.waiting))
            self._newest[engine] = prompt_ids, home
        return home

    def _new_homes(self, engine: HTTPEngine) -> list[_Home]:
        """Those with the fewest engines of those on its node, or of all."""
        beside = [home for home in self._homes if home.node == engine.node_id] or self._homes
        held = Counter(id(home) for homes in self._homes_of.values() for home in homes)
        self._homes_of[engine] = sorted(beside, key=lambda each: held[id(each)])[: self._per_server]
        return self._homes_of[engine]

    @property
    def watched(self) -> tuple[WatchedProcess, ...]:
        return tuple(
            WatchedProcess(name=f"collector {number}", node=home.host, node_id=home.node, process=home.process)
            for number, home in enumerate(self._homes)
        )

    async def close(self) -> None:
        self._is_closing = True
        for actor in self._actors:
            actor.leave.options(max_task_retries=0).remote()
        if self._listeners:
            await asyncio.wait(self._listeners, timeout=_LEAVE_SECONDS)
        for listener in self._listeners:
            listener.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._homes, self._homes_of, self._listeners, self._stored_intake = [], [], {}, [], []
        self._newest = {}

    def _submit_new(self, home: _Home) -> None:
        new, home.new = home.new, []
        self._submit(home, [number for number in new if number in home.waiting])

    def _submit(self, home: _Home, numbers: Iterable[int]) -> None:
        """A call for each message to each server. Nobody waits for it: if the actor ends, `answers` says so."""
        submit = home.actor.submit.options(max_task_retries=0)
        for engine, members in groupby(
            sorted(numbers, key=lambda number: id(home.waiting[number].engine)), lambda n: home.waiting[n].engine
        ):
            left = list(members)
            before = {number: found for number in left if (found := home.waiting[number].so_far) is not None}
            drawn = [before[number].num_tokens if number in before else 0 for number in left]
            for message in messages_of([home.waiting[number].request for number in left], drawn):
                sent, left = left[: len(message)], left[len(message) :]
                so_far = {number: before[number] for number in sent if number in before}
                # Ray serializes argument by argument with cloudpickle, which costs more than the call.
                submitted = pickle.dumps((engine.url, engine.name, sent, dump_requests(message)))
                submit.remote(self._stored_intake, submitted, so_far)

    def _drop(self, home: _Home, number: int) -> None:
        if not home.dropped:
            asyncio.get_running_loop().call_soon(self._drop_all, home)
        home.dropped.append(number)

    def _drop_all(self, home: _Home) -> None:
        dropped, home.dropped = home.dropped, []
        if home.failure is None and self._actors:
            home.actor.drop.remote(dropped)

    async def _listen(self, home: _Home) -> None:
        """Whatever ends it is told to all that wait: nothing else would ever answer them."""
        try:
            while not self._is_closing:
                life = home.life
                # No name of this frame: it would hold the message until the next one comes.
                self._deliver(home, *await home.actor.answers.remote(life))
                if home.life != life:  # Ray has made it again
                    _, home.host, home.process = await home.actor.begin.remote(self._stored_intake)
        except Exception as error:
            self._fail(home, error)

    def _deliver(self, home: _Home, life: str, references: list[Any], answers: bytes) -> None:
        if life != home.life:
            home.life = life
            self._submit(home, [number for number in home.waiting if number not in home.new])
        for number, outcome in unpacked(references, answers).items():
            _settle(home.waiting.pop(number, None), outcome)

    def _fail(self, home: _Home, failure: Exception) -> None:
        home.failure = failure
        waiting, home.waiting = home.waiting, {}
        for each in waiting.values():
            _settle(each, _told(failure))


def _settle(waiting: _Waiting | None, outcome: Answer | Exception) -> None:
    """Nothing if nobody waits any more."""
    if waiting is None or waiting.answer.done():
        return
    if isinstance(outcome, Exception):
        waiting.answer.set_exception(outcome)
    else:
        waiting.answer.set_result(outcome)


def _told(error: Exception) -> Exception:
    """Cause of a call's failure, anew for each who waits."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return error.cause if isinstance(error.cause, MoerlError) else error
    return _lost(error) if isinstance(error, LOST) else error


def _late(seconds: float, num_actors: int) -> StoreError:
    logs = ray_folder() / "ray/session_latest/logs"
    late = StoreError(
        f"deadlines.start_seconds = {seconds:g}: not all of rollout.num_collectors = {num_actors} processes that receive completions have "
        f"started\n    why: Ray has not made them, or one of them hangs; their logs are in {logs}\n"
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
