"""Calls to training ranks: each has the deadline of its phase, and a failure of ranks is one error that names the first of them.

A rank that fails leaves the others in a collective, and one that hangs keeps them there: after either the ranks are of no use, and every
call that still waits ends with the same error.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ray.exceptions import OutOfMemoryError, RayError

from moerl.cluster.error_texts import headline, is_consequence
from moerl.cluster.lost_actors import LOST, is_lost, lost_node, memory_report, was_killed
from moerl.cluster.patient_wait import patient_wait
from moerl.cluster.ray_nodes import on_node
from moerl.config.schema.deadlines import DeadlineConfig, Phase
from moerl.hangs.examine import kill, memory_kills
from moerl.hangs.hang_reports import HangReports
from moerl.hangs.watched import ProcessId, WatchedProcess
from moerl.types.errors import HangError, MoerlError, Origin, TrainError
from moerl.types.exit_codes import ExitCode
from moerl.types.system_errors import is_of_machine

Calls = dict[int, asyncio.Task[Any]]
"""By rank."""

_KILL_SECONDS = 20.0
_PHASES: Mapping[str, Phase] = {
    "place": "start", "host": "start", "address": "start", "set_environment": "start", "open_store": "start", "start": "start",
    "data_rank": "start", "planner": "start", "add_model": "start",
    "load": "load", "faults_of_checkpoint": "load",
    "wake": "wake", "shed": "wake", "sleep": "wake", "logprobs": "logprobs", "reference_logprobs": "logprobs", "values": "logprobs",
    "update": "update",
    "stage_checkpoint": "save", "write_checkpoint": "save", "finish_checkpoint": "save", "export_hf": "save",
}  # fmt: skip
"""Phase of a call; all others belong to a push."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank runs, as it says itself."""

    host: str
    node_id: str
    process: ProcessId
    log: Path
    memory_counter: Path | None
    """Counter of its cgroup, see moerl.hangs.examine.memory_counter."""
    memory_kills: int | None
    """When it started."""


class RankCalls:
    """`workers`: Ray actors with the verbs of moerl.train.train_worker.TrainWorker, by rank."""

    def __init__(self, workers: Sequence[Any], deadlines: DeadlineConfig, hangs: HangReports, *, title: str = "rank"):
        """`title`: what reports call one of them, before its number."""
        self._workers, self._deadlines = list(workers), deadlines
        self._hangs, self._title = hangs, title
        self._places: list[RankPlace] = []
        self._hung: asyncio.Future[HangError] = asyncio.get_running_loop().create_future()
        self._open: list[Calls] = []

    def know(self, places: Sequence[RankPlace]) -> None:
        """From here on reports can look at the ranks."""
        self._places = list(places)

    @property
    def watched(self) -> list[WatchedProcess]:
        if not self._places:
            return [WatchedProcess(name=f"{self._title} {rank}", node="?", rank=rank) for rank in range(len(self._workers))]
        return [
            WatchedProcess(
                name=f"{self._title} {rank}", node=place.host, node_id=place.node_id, process=place.process, log=place.log, rank=rank
            )
            for rank, place in enumerate(self._places)
        ]

    async def on_ranks(self, verb: str, ranks: Sequence[int], *args: Any, each: Sequence[Any] | None = None) -> list[Any]:
        """The answers, in the order of `ranks`; `each`: of every one of them an argument before `args`.

        HangError at the deadline; TrainError, or a MoerlError of the rank that failed first.
        """
        if not ranks:
            return []
        own = [()] * len(ranks) if each is None else [(first,) for first in each]
        calls = {
            rank: asyncio.ensure_future(_await(getattr(self._workers[rank], verb).remote(*first, *args)))
            for rank, first in zip(ranks, own, strict=True)
        }
        ended: list[int] = []
        for rank, call in calls.items():
            call.add_done_callback(partial(_note, ended, rank))
        self._open.append(calls)
        began = time.monotonic()
        try:
            await self._wait(verb, calls)
            if any(map(has_failed, calls.values())):
                await asyncio.wait(calls.values(), timeout=self._deadlines.settle_seconds)
                await asyncio.sleep(0)  # the last ones have not been noted yet
                failures = {rank: error for rank in ended if (error := calls[rank].exception()) is not None}
                await self._find_awaited(_PHASES.get(verb, "push"), calls, failures.values(), time.monotonic() - began)
                raise await self._cause(verb, failures)
        finally:
            self._open.remove(calls)
            forget(calls.values())
        return [call.result() for call in calls.values()]

    async def end(self) -> None:
        """After ray.kill, which a stopped process does not hear: ranks that hung are killed by their process."""
        if not self._hung.done():
            return
        by_node: dict[str, list[ProcessId]] = {}
        for place in self._places:
            by_node.setdefault(place.node_id, []).append(place.process)
        killing = (on_node(node_id, kill, processes, seconds=_KILL_SECONDS) for node_id, processes in by_node.items())
        await asyncio.gather(*killing, return_exceptions=True)  # of a node that is gone

    async def _wait(self, verb: str, calls: Calls) -> None:
        """Until all have ended or one has failed. HangError if they have not at the deadline, or other calls have not at theirs."""
        phase = _PHASES.get(verb, "push")
        ending = asyncio.ensure_future(asyncio.wait(list(calls.values()), return_when=asyncio.FIRST_EXCEPTION))
        try:
            while not ending.done() and not self._hung.done():
                await patient_wait((ending, self._hung), seconds=self._deadlines.of(phase), return_when=asyncio.FIRST_COMPLETED)
                # The last answers may have come at the same moment.
                if not ending.done() and not self._hung.done() and not all(call.done() for call in calls.values()):
                    await self._find_hung(phase)
        finally:
            ending.cancel()
        if not ending.done():
            raise self._hung.result()

    async def _find_hung(self, phase: Phase) -> None:
        silent = sorted({rank for calls in self._open for rank, call in calls.items() if not call.done()})
        deadline = f"{self._deadlines.of(phase):g} s (deadlines.{phase}_seconds)"
        error = await self._hangs.report(phase, deadline, watched=self.watched, silent=[f"{self._title} {rank}" for rank in silent])
        # In a push ranks wait for a server that hangs: who pushes to it ends it, and the push begins anew.
        if not self._hung.done() and any(each.name in error.names for each in self.watched):
            self._hung.set_result(error)

    async def _find_awaited(self, phase: Phase, calls: Calls, failures: Iterable[BaseException], seconds: float) -> None:
        """HangError if the others, near the deadline, gave up to wait for ranks that still say nothing."""
        is_open = any(not call.done() for call in calls.values())
        if is_open and seconds > self._deadlines.of(phase) / 2 and all(map(_lost_another, failures)):
            await self._find_hung(phase)
            if self._hung.done():
                raise self._hung.result()

    async def _cause(self, verb: str, failures: Mapping[int, BaseException]) -> BaseException:
        """The first failure that is not a consequence of another; a MoerlError of a rank as it is. `failures` in the order they arrived."""
        rank, error = min(failures.items(), key=lambda item: _lost_another(item[1]))
        others = {other: failure for other, failure in failures.items() if other != rank}
        origin = self._origin(rank, verb, _details(rank, error, others))
        cause = getattr(error, "cause", None)
        if isinstance(cause, MoerlError):  # which may have begun in another process, as where samples were lost
            began = cause.origin
            return cause.began_in(origin if began is None else replace(began, doing=verb, details=origin.details))
        lines = [f"{origin.who} failed in {verb}, on node {origin.node}", *await self._reason(rank, error)]
        if others:
            lines.append(f"after it failed: {', '.join(f'rank {other}' for other in others)}")
        wrapped = TrainError("\n".join(lines)).began_in(origin)
        wrapped.__cause__ = error
        if is_lost(error) or is_of_machine(error if cause is None else cause):
            wrapped.exit_code = ExitCode.KILLED
        return wrapped

    def _origin(self, rank: int, verb: str, details: str) -> Origin:
        place = self._places[rank] if self._places else None
        node, log = ("?", "") if place is None else (place.host, str(place.log))
        return Origin(who=f"{self._title} {rank} of {len(self._workers)}", node=node, doing=verb, log=log, details=details)

    async def _reason(self, rank: int, error: BaseException) -> list[str]:
        if not was_killed(error):
            return headline(str(error))
        if isinstance(error, OutOfMemoryError):
            return [f"    {line}" for line in memory_report(error)]
        if (why := lost_node(error)) is not None:
            return [
                f"    Ray has lost its node, which was {why}",
                "    the node was killed or cut off, or it stands still, with the rank on it",
            ]
        place = self._places[rank] if self._places else None
        if place is None:
            return str(error).splitlines()
        return [f"    its process {place.process.pid} died without a Python error", *_crash(place.log), *await _memory(place)]


def _lost_another(error: BaseException) -> bool:
    """A sign of another rank's failure; not Ray's word that this one is gone, which tells of closed connections too."""
    return not isinstance(error, LOST) and is_consequence(error)


async def _memory(place: RankPlace) -> list[str]:
    if place.memory_counter is None or place.memory_kills is None:
        return []
    try:
        now = await on_node(place.node_id, memory_kills, place.memory_counter, seconds=_KILL_SECONDS)
    except (RayError, OSError) as error:
        return [f"    its node does not answer: {str(error) or f'not within {_KILL_SECONDS:g} s'}"]
    if now is None or now == place.memory_kills:
        return []
    return [f"    the kernel killed {now - place.memory_kills} processes there for lack of memory, probably this one"]


def _crash(log: Path) -> list[str]:
    """Text that faulthandler wrote at a crash: a process killed from outside writes nothing."""
    try:
        text = log.read_text(errors="replace")
    except OSError as error:
        return [f"    its log cannot be read: {error}"]
    begin = text.rfind("Fatal Python error")
    if begin < 0:
        return ["    it wrote no crash into its log: it was killed from outside, as by signal 9"]
    return [f"    {line}" for line in text[begin:].splitlines()[:12]]


def _details(rank: int, error: BaseException, others: Mapping[int, BaseException]) -> str:
    why = {other: " (it lost a peer)" if _lost_another(failure) else "" for other, failure in others.items()}
    after = (f"\nafter it failed rank {other}{why[other]}:\n{failure}" for other, failure in others.items())
    return "\n".join([f"rank {rank}:\n{error}", *after])


def _note(ended: list[int], rank: int, _: asyncio.Task[Any]) -> None:
    ended.append(rank)


async def _await(reference: Any) -> Any:
    return await reference


def forget(calls: Iterable[asyncio.Task[Any]]) -> None:
    """Nobody waits for them any more: what they may yet fail with is no news."""
    for call in calls:
        call.cancel()
        call.add_done_callback(lambda done: done.cancelled() or done.exception())


def has_failed(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
