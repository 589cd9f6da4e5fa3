"""All rollout servers as one: a request goes to one that serves (moerl/rollout/fleet/request_queue.py says to which), a command to every
one that runs. What comes back is received by a collector (moerl/rollout/fleet/collector.py), so that the pool holds references, not tokens.

A request whose server ends is run again, with its seed, on another one, or on the same one once it is back. One that a server ends before
its completion is done, as pause(abort) does, goes on from the tokens it has (moerl/rollout/fleet/continuation.py).
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from moerl.cluster.patient_wait import PatientTimeout
from moerl.hangs.hang_reports import HangReports
from moerl.hangs.watched import ProcessId, WatchedProcess
from moerl.rollout.fleet.collector import Answer, Collector
from moerl.rollout.fleet.fleet import Fleet, Member
from moerl.rollout.fleet.request_queue import Claim, RequestQueue
from moerl.rollout.server.contract import EngineHealth, EngineRefuses, MemoryPart, PauseMode, RolloutEngine
from moerl.rollout.server.wire import GenerateRequest
from moerl.types.completion import SamplingParams
from moerl.types.errors import EngineError, EngineUnavailable, EngineUnsound, HangError
from moerl.types.stored import StoredCompletion

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_ATTEMPTS = 5
"""Attempts that a request has: one that ends every server it comes to must not go on."""


class RolloutPool:
    """Owned by one event loop."""

    def __init__(
        self, engines: Sequence[RolloutEngine], *, max_running: int, max_queued: int, collector: Collector, request_seconds: float,
        cache_high: float = 0.9, max_restarts: int = 0, probe_seconds: float = 30.0, command_seconds: float = 300.0,
        hangs: HangReports | None = None, resumes: bool = True,
    ):  # fmt: skip
        """`max_running`, `max_queued`: requests that each server decodes, and that wait there, while its cache has room:
        above a share of `cache_high` it gets no new ones. `request_seconds`: deadline of one
        completion, with the time it waits for a server, is paused, or waits for a slot. `command_seconds`: deadline of pause, resume,
        abort, sleep and wake, which a server may owe while it answers probes: its engine runs in other processes.
        The pool starts and closes `collector`.
        `resumes`: a completion that was broken off goes on from its tokens; else it begins anew, with the bits of one never disturbed."""
        if not engines:
            raise EngineError("rollout.num_servers = 0: must be at least 1; nothing could generate")
        self.hangs = hangs
        self.fleet = Fleet(engines, max_restarts=max_restarts, probe_seconds=probe_seconds, hangs=hangs)
        self._places = RequestQueue(self.fleet, max_running=max_running, max_queued=max_queued, cache_high=cache_high)
        self._request_seconds, self._command_seconds, self._collector = request_seconds, command_seconds, collector
        self._resumes = resumes
        self.num_resumed = 0
        """Times that a request went on elsewhere, or later, from the tokens it had; so far."""

    @property
    def num_preempted(self) -> int:
        """Times that servers took a request's cache away for others, so far."""
        return sum(bound.num_preempted for bound in self._places.bounds.values())

    @property
    def least_bound(self) -> int:
        """Requests that the server whose cache has least room may have."""
        return min(bound.now for bound in self._places.bounds.values())

    async def start(self) -> None:
        """All servers at once; if one fails, the others are closed."""
        try:
            servers = self._all("start", lambda engine: engine.start(), self.fleet.members)
            for outcome in await asyncio.gather(servers, self._collector.start(), return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
        except BaseException:
            await self.close()
            raise
        self.fleet.watch()

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str, *, session: str | None = None
    ) -> Answer:
        """`session`: of requests whose prompts begin alike; None: of this one alone. EngineError if the server refuses it, if no server is
        left, or at the deadline, HangError if another process is to blame for that; the server then drops the request."""
        claim = self._places.claim(request_id if session is None else session)
        asked: list[Member] = []
        try:
            async with PatientTimeout(self._request_seconds):
                return await self._generate(
                    GenerateRequest(prompt_ids=tuple(prompt_ids), sampling=sampling, request_id=request_id), claim, asked
                )
        except TimeoutError as error:
            if not asked:
                raise EngineError(
                    f"{request_id} got no server within deadlines.completion_seconds = {self._request_seconds:g}; "
                    f"{', '.join(f'{member.name} is {member.state}' for member in self.fleet.members)}{self._busy()}"
                ) from error
            hang = await self.hang(f"{self._request_seconds:g} s (deadlines.completion_seconds)", asked[-1:])
            if hang is not None and not any(each.name in hang.names for each in asked[-1].engine.watched):
                raise hang from error  # whoever receives for it hangs, and not the server
            raise EngineError(
                f"{asked[-1].engine.name}: {request_id} took longer than deadlines.completion_seconds = "
                f"{self._request_seconds:g}; the server hangs, is paused, or has more requests than it can serve in time. Look at its log, "
                "or raise the deadline" + (f"\n{hang}" if hang is not None else "")
            ) from (error if hang is None else hang)

    def _busy(self) -> str:
        """Cause, and what mends it, of a request that waited too long for servers that serve."""
        if not self.fleet.healthy():
            return ""
        running = sum(member.num_in_flight for member in self.fleet.members)
        return (
            f", with {running} requests, and {self._places.num_waiting + 1} waited. The wait in the driver counts, which lasts as long as "
            "what was asked before: raise the deadline, or rollout.max_running, or have more servers"
        )

    def watched(self) -> list[WatchedProcess]:
        """Processes of all servers."""
        return [each for member in self.fleet.members for each in member.engine.watched]

    async def hang(self, deadline: str, members: Collection[Member]) -> HangError | None:
        """The report about a rollout that is late for the sake of `members`, or, without any, of the driver."""
        if self.hangs is None:
            return None
        driver = WatchedProcess(name="driver", node=socket.gethostname(), process=ProcessId.of(os.getpid()))
        watched = [*self.watched(), *self._collector.watched, driver]
        silent = [each.name for member in members for each in member.engine.watched] if members else [driver.name]
        return await self.hangs.report("rollout", deadline, watched=watched, silent=silent)

    async def pause(self, mode: PauseMode, members: Collection[Member] | None = None) -> None:
        """`members`: these servers only."""
        await self._command("pause", lambda engine: engine.pause(mode), members)

    async def resume(self, members: Collection[Member] | None = None) -> None:
        """`members`: these servers only."""
        await self._command("resume", lambda engine: engine.resume(), members)

    async def abort(self, members: Collection[Member] | None = None) -> None:
        """Every request on them returns what it has, and goes on when a server is free."""
        await self._command("abort", lambda engine: engine.abort(), members)

    async def sleep(self, parts: tuple[MemoryPart, ...], members: Collection[Member] | None = None) -> int:
        """Bytes all of them gave back."""
        return sum(await self._command("sleep", lambda engine: engine.sleep(parts), members))

    async def wake(self, parts: tuple[MemoryPart, ...], members: Collection[Member] | None = None) -> int:
        return sum(await self._command("wake", lambda engine: engine.wake(parts), members))

    async def close(self) -> None:
        await self.fleet.close()
        try:
            await self._all("close", lambda engine: engine.close(), self.fleet.members)
        finally:
            await self._collector.close()

    async def healths(self) -> dict[str, EngineHealth]:
        """Health of those that run, by their names."""
        members = self.fleet.running()
        healths = await self._all("health", lambda engine: engine.health(), members)
        return {member.name: health for member, health in zip(members, healths, strict=True)}

    async def _generate(self, request: GenerateRequest, claim: Claim, asked: list[Member]) -> Answer:
        """`asked` gets the server while it is asked."""
        so_far: StoredCompletion | None = None
        met_push = False
        num_lost = 0
        while True:
            asked.clear()
            async with self._places.take(claim) as member:
                asked.append(member)
                turn, starts = member.num_turns, member.num_starts
                try:
                    answer = await self._collector.ask(member.engine, request, so_far)
                except (EngineUnavailable, EngineUnsound) as error:
                    num_lost += self._counts(error, member, turn, starts)
                    if num_lost == MAX_ATTEMPTS:
                        raise
                    logger.info("%s is run again: %s", request.request_id, str(error).splitlines()[0])
                    continue
                if answer.completion.finish_reason != "abort":  # which came because the cache is about to be emptied
                    self._places.report(member, answer.load)
            has_more = so_far is None or answer.completion.num_tokens > so_far.num_tokens
            if lie := self.fleet.false_span(answer.completion.spans, member if has_more else None):
                self.fleet.retire(member, EngineError(f"{member.name}: {request.request_id}: {lie}; its weights are not the trainer's"))
                continue
            met_push = met_push or member.num_turns != turn
            if answer.completion.finish_reason != "abort":
                return replace(answer, completion=replace(answer.completion, met_push=True)) if met_push else answer
            if self._resumes:
                so_far = answer.completion
                self.num_resumed += so_far.num_tokens > 0

    def _counts(self, error: EngineError, member: Member, turn: int, starts: int) -> bool:
        """Tells the fleet. Whether the request, or the server, may be at fault, and not the moment."""
        if isinstance(error, EngineUnsound):
            self.fleet.answered_falsely(member, error, starts=starts)
            return True
        if isinstance(error, EngineRefuses):
            return self.fleet.refused(member, turn=turn)
        self.fleet.broke_off(member)
        return True

    async def _command(
        self, action: str, call: Callable[[RolloutEngine], Awaitable[T]], members: Collection[Member] | None = None
    ) -> list[T]:
        """`_all`; a server that does not answer in time is ended, and started again, with the report about it as the reason."""
        running = {member.engine: member for member in self.fleet.members}

        async def in_time(engine: RolloutEngine) -> T:
            starts = running[engine].num_starts
            try:
                async with PatientTimeout(self._command_seconds):
                    return await call(engine)
            except TimeoutError as error:
                deadline = f"{self._command_seconds:g} s (deadlines.push_seconds)"
                late, hang = EngineUnavailable(f"{engine.name}: no answer to {action} within {deadline}"), None
                if self.hangs is not None:
                    watched = engine.watched
                    hang = await self.hangs.report(self.fleet.phase, deadline, watched=watched, silent=[each.name for each in watched])
                    late = EngineUnavailable(f"{late}\n{hang}")
                    late.origin = hang.origin
                self.fleet.answered_falsely(running[engine], late, starts=starts)
                raise late from (error if hang is None else hang)

        return await self._all(action, in_time, members)

    async def _all(self, action: str, call: Callable[[RolloutEngine], Awaitable[T]], members: Collection[Member] | None = None) -> list[T]:
        """Answers of all that run, or of `members`. Waits for every server, also when one fails; EngineError with every failure."""
        asked = {member: member.num_starts for member in (self.fleet.running() if members is None else members)}
        outcomes = await asyncio.gather(*(call(member.engine) for member in asked), return_exceptions=True)
        failures = {member: outcome for member, outcome in zip(asked, outcomes, strict=True) if isinstance(outcome, BaseException)}
        for member, failure in failures.items():
            if isinstance(failure, EngineUnsound):
                self.fleet.answered_falsely(member, failure, starts=asked[member])
        if failures:
            lines = [f"{action} failed on {len(failures)} of {len(asked)} servers"]
            lines += [f"* {e}" if isinstance(e, EngineError) else f"* {member.name}: {e!r}" for member, e in failures.items()]
            raise EngineError("\n".join(lines)) from next(iter(failures.values()))
        return outcomes  # type: ignore[return-value]
