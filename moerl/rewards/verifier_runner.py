"""Place of the pool where checks run: a worker for each level of isolation, which gets several checks in one message.

    message -> worker of the first level -> those that passed -> worker of the next level -> answers of each check, or its Failure

Checks of a message run in order, each within its deadline, and the answer to each is read before the next one's. If the worker ends, or
anything else comes over its channel, nobody can tell which of them did it: those without an answer, after a forgery all of them, run again,
each in a worker of its own.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from moerl.config.schema.data_config import Isolation, RewardConfig, RewardTerm
from moerl.rewards.answer_channel import ForgedAnswer
from moerl.rewards.reward_process import WorkerProcess
from moerl.rewards.reward_supervisor import MAX_TASKS, TOO_MANY_TASKS
from moerl.types.errors import ConfigError, Problem, problem
from moerl.types.exit_codes import ExitCode

START_SECONDS = 120.0
"""Seconds for one worker to import its verifiers' packages."""

ErrorKind = Literal["timeout", "died", "raised", "not_a_number", "forged", "no_worker"]
"""forged: something on the worker's channel that is not its answer to the check."""
Answers = dict[str, dict[str, Any]]
"""{"value", "extra"} of each term that was asked; of the last one perhaps {"kind", "error"}."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a check has no score."""

    kind: ErrorKind
    path: str
    reason: str


@dataclass(eq=False, slots=True)
class PendingVerdict:
    """One check, and who waits for it."""

    body: bytes
    """A pickled VerifierInput."""
    outcome: asyncio.Future[Answers | Failure]
    found: Answers = field(default_factory=dict)
    term: str = ""
    """Under way."""
    spent: float = 0.0
    """Seconds at the levels that it passed."""
    has_lost_worker: bool = False
    deadline: asyncio.Timeout | None = None
    """While it runs."""

    @property
    def path(self) -> str:
        return f"reward.terms.{self.term}"

    def settle(self, outcome: Answers | Failure) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def give_up(self) -> None:
        """Nobody waits for it any more: if it runs, its time is over."""
        if self.deadline is not None and not self.deadline.expired():
            self.deadline.reschedule(asyncio.get_running_loop().time())


class VerifierRunner:
    def __init__(self, config: RewardConfig, levels: Mapping[Isolation, Mapping[str, RewardTerm]], memory_bytes: int):
        """`levels`: the terms by name of each level of isolation. `memory_bytes`: as RewardPool."""
        self.workers: dict[Isolation, WorkerProcess] = {}
        self._config, self._levels, self._memory_bytes = config, levels, memory_bytes

    async def close(self) -> None:
        await asyncio.gather(*map(self._kill, list(self.workers)))

    async def run(self, message: Sequence[PendingVerdict]) -> None:
        """Settles each of them."""
        for level in self._levels:
            message = await self._pass(level, message)
        for asked in message:
            asked.settle(asked.found)

    async def _pass(self, level: Isolation, message: Sequence[PendingVerdict]) -> list[PendingVerdict]:
        """Those that passed all terms of the level, in order; the others are settled."""
        passed: list[PendingVerdict] = []
        left, together = list(message), True
        while left := [asked for asked in left if not asked.outcome.done()]:
            turn = left if together else left[:1]
            given, error = await self._turn(level, turn)
            if isinstance(error, ForgedAnswer) and len(turn) > 1:
                given = []
            for asked, (answers, seconds) in zip(turn, given, strict=False):
                asked.spent += seconds
                asked.found |= answers
                last = answers[asked.term]
                if "error" in last:
                    asked.settle(Failure(last["kind"], asked.path, last["error"]))
                else:
                    passed.append(asked)
            left = left[len(given) :]
            if error is not None:
                together = together and isinstance(error, TimeoutError)
                if failure := await self._judge(level, left[0], error, was_alone=len(turn) == 1):
                    left[0].settle(failure)
            elif not together:
                await self._kill(level)  # what it does yet is nobody else's
        return passed

    async def _turn(self, level: Isolation, turn: Sequence[PendingVerdict]) -> tuple[list[tuple[Answers, float]], Exception | None]:
        """Answers to the first checks of the turn with the seconds that each took, and why there are no more; None if these are all."""
        terms = list(self._levels[level])
        given: list[tuple[Answers, float]] = []
        for asked in turn:
            asked.term = terms[0]
        try:
            worker = self.workers.get(level) or await self.start_worker(level)
            async with self._within_deadline(turn[0]):  # a worker that reads nothing more would never be found out
                numbers = await worker.ask([asked.body for asked in turn])
            for asked, number in zip(turn, numbers, strict=True):
                answers = await self._answers(worker, asked, number, terms)
                if asked is turn[-1]:
                    worker.require_silence()
                given.append(answers)
        except (TimeoutError, ConnectionError, ForgedAnswer, ConfigError) as error:
            return given, error
        return given, None

    async def _answers(self, worker: WorkerProcess, asked: PendingVerdict, number: str, terms: Sequence[str]) -> tuple[Answers, float]:
        answers: Answers = {}
        began = asyncio.get_running_loop().time()
        async with self._within_deadline(asked):
            for asked.term in terms:
                answers[asked.term] = answer = await worker.answer(number)
                if "error" in answer:
                    break
        return answers, asyncio.get_running_loop().time() - began

    @asynccontextmanager
    async def _within_deadline(self, asked: PendingVerdict) -> AsyncIterator[None]:
        asked.deadline = asyncio.timeout(self._config.timeout_seconds - asked.spent)
        try:
            async with asked.deadline:
                yield
        finally:
            asked.deadline = None

    async def _judge(self, level: Isolation, asked: PendingVerdict, error: Exception, *, was_alone: bool) -> Failure | None:
        """Kills the worker, whatever the error. None if the check that was under way, or next, is to run again."""
        status = await self._kill(level)
        had_too_many = status == TOO_MANY_TASKS
        if isinstance(error, TimeoutError):
            return Failure("timeout", asked.path, f"not done after reward.timeout_seconds={self._config.timeout_seconds:g}")
        if isinstance(error, ConfigError):
            return Failure("no_worker", error.problems[0].path, error.problems[0].reason)
        if not was_alone and (had_too_many or isinstance(error, ForgedAnswer)):
            return None
        if isinstance(error, ForgedAnswer):  # not run again: what forged it may be the response itself
            return Failure("forged", asked.path, str(error))
        if had_too_many:
            return Failure("died", asked.path, f"ended with its worker: it had more than {MAX_TASKS} processes and threads")
        if asked.has_lost_worker:
            return Failure("died", asked.path, f"{error} (exit status {status})")
        asked.has_lost_worker = True  # killed from outside, perhaps: then another one lives
        return None

    async def start_worker(self, level: Isolation, *, is_second: bool = False) -> WorkerProcess:
        """Raises ConfigError with the reason if there is none within START_SECONDS. One that is killed as it starts is started again."""
        terms, refusal = self._levels[level], {}
        try:
            worker = self.workers[level] = await WorkerProcess.start(level)
            async with asyncio.timeout(START_SECONDS):
                refusal = await worker.set_up(dict(terms), self._memory_bytes)
            if refusal:
                raise ConnectionError(refusal["error"])
        except (OSError, TimeoutError, ForgedAnswer) as error:
            was_killed = await self._kill(level) == -signal.SIGKILL and isinstance(error, ConnectionError) and not refusal
            if was_killed and not is_second:
                return await self.start_worker(level, is_second=True)
            name = refusal.get("term", next(iter(terms)))
            reason = "it was killed by signal 9 as it started, twice" if was_killed else str(error)
            found = ConfigError([_problem(name, self._config.terms[name], reason if reason else f"not ready after {START_SECONDS:g} s")])
            if was_killed:
                found.exit_code = ExitCode.KILLED
            raise found from error
        return worker

    async def _kill(self, level: Isolation) -> int | None:
        """Exit status of the worker; None if there is none."""
        worker = self.workers.pop(level, None)
        return None if worker is None else await worker.kill()


def _problem(name: str, term: RewardTerm, reason: str) -> Problem:
    value = term.kind if term.path is None else term.path
    fix = "correct what the reason names; the verifier is built in a process of its own, on this machine"
    return problem(f"reward.terms.{name}", value, "its verifier must start", reason, fix)
