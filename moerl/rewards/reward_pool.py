"""Scores samples in killable worker processes: a verifier that hangs, dies or misbehaves costs one worker, never the run.

score(prompt, text) -> free slot -> its worker (a new one if the last was killed) -> all terms within one deadline -> Score
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moerl.config.schema.data_config import Isolation, RewardConfig, RewardTerm
from moerl.rewards.answer_channel import ForgedAnswer
from moerl.rewards.reward_process import WorkerProcess
from moerl.rewards.reward_supervisor import MAX_TASKS, TOO_MANY_TASKS
from moerl.rewards.verifiers import PURE_KINDS, Check
from moerl.rewards.worker_sandbox import missing
from moerl.types.errors import ConfigError, Problem
from moerl.types.groups import Prompt, Score

logger = logging.getLogger(__name__)

MEMORY_BYTES = 4 * 2**30
"""Bytes that the checks of one worker may allocate, beyond what its verifiers' packages take."""
START_SECONDS = 120.0
"""Seconds for one worker to import its verifiers' packages."""

ErrorKind = Literal["timeout", "died", "raised", "not_a_number", "forged", "no_worker"]
"""forged: something on the worker's channel that is not its answer to the check."""


class _WorkerDied(Exception):
    def __init__(self, path: str, reason: str):
        super().__init__(reason)
        self.path = path


_Place = tuple[int, Isolation]
"""Where a worker is: each slot has one for each level of isolation that a term asks for, which runs the terms of that level."""


class RewardPool:
    """`async with RewardPool(config) as pool: score = await pool.score(prompt, text)`, from one event loop."""

    def __init__(self, config: RewardConfig, *, memory_bytes: int = MEMORY_BYTES):
        self.error_counts: Counter[ErrorKind] = Counter()
        """Samples that could not be scored, since the pool was made."""
        self._config = config
        self._memory_bytes = memory_bytes
        self._levels: dict[Isolation, dict[str, RewardTerm]] = {}
        for name, term in config.terms.items():
            self._levels.setdefault(term.isolation, {})[name] = _absolute(term)
        self._workers: dict[_Place, WorkerProcess] = {}
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._running = False

    async def __aenter__(self) -> "RewardPool":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Raises ConfigError if a verifier cannot be built, such as a user's function that cannot be imported."""
        self._tell_isolation()
        places = [(slot, level) for slot in range(self._config.num_workers) for level in self._levels]
        try:
            # Waiting for all of them leaves no start under way that `close` would miss.
            outcomes = await asyncio.gather(*(self._start_worker(place) for place in places), return_exceptions=True)
            for error in filter(None, outcomes):
                raise error
        except BaseException:
            await self.close()
            raise
        self._free = asyncio.Queue()
        for slot in range(self._config.num_workers):
            self._free.put_nowait(slot)
        self._running = True

    def _tell_isolation(self) -> None:
        """Whose checks may do what the run may: as was written down, or because they evaluate nothing and this machine isolates nothing."""
        free = list(self._levels.get("off", ()))
        if free:
            logger.warning("checks without isolation, as set: reward.terms %s", ", ".join(free))
        pure = [name for name, term in self._config.terms.items() if term.kind in PURE_KINDS and term.isolation != "off"]
        if pure and (lacking := missing()):
            logger.warning("checks without isolation: reward.terms %s: this machine lacks %s", ", ".join(pure), " and ".join(lacking))

    async def close(self) -> None:
        """Ends every worker and waits for their exit; safe to call twice and before start. Checks under way get an error."""
        self._running = False
        await asyncio.gather(*(self._kill(place) for place in list(self._workers)))

    async def score(self, prompt: Prompt, text: str) -> Score:
        """Never raises for what a verifier does: such a sample has reward 0 and says why in `error`."""
        check = Check(text=text, data_source=prompt.data_source, ground_truth=prompt.ground_truth, extra_info=prompt.extra_info)
        self._require_running()
        slot = await self._free.get()
        try:
            self._require_running()
            try:
                return await self._score_in(slot, check)
            except _WorkerDied:  # killed from outside, perhaps: then another one lives
                return await self._score_in(slot, check)
        except _WorkerDied as died:
            return self._failed("died", died.path, str(died))
        except ConfigError as error:
            return self._failed("no_worker", error.problems[0].path, error.problems[0].reason)
        except BaseException:  # cancelled: the worker would answer a check that is over
            await asyncio.gather(*(self._kill((slot, level)) for level in self._levels))
            raise
        finally:
            self._free.put_nowait(slot)

    async def _score_in(self, slot: int, check: Check) -> Score:
        """_WorkerDied if a worker of the slot, which is started if there is none, ends before it answers."""
        for level in self._levels:
            if (slot, level) not in self._workers:
                await self._start_worker((slot, level))
        found: dict[str, dict[str, Any]] = {}
        at = _Progress(place=(slot, next(iter(self._levels))), term=next(iter(self._config.terms)))
        try:
            async with asyncio.timeout(self._config.timeout_seconds):
                failure = await self._ask_all(check, at, found)
        except TimeoutError:
            await self._kill(at.place)
            return self._failed("timeout", at.path, f"not done after reward.timeout_seconds={self._config.timeout_seconds:g}")
        except ForgedAnswer as forged:  # not scored again: what forged it may be the response itself
            await self._kill(at.place)
            return self._failed("forged", at.path, str(forged))
        except ConnectionError as error:
            status = await self._kill(at.place)
            if status == TOO_MANY_TASKS:
                return self._failed("died", at.path, f"ended with its worker: it had more than {MAX_TASKS} processes and threads")
            raise _WorkerDied(at.path, f"{error} (exit status {status})") from error
        if failure is not None:
            return self._failed(failure["kind"], at.path, failure["error"])
        return self._score(found)

    async def _ask_all(self, check: Check, at: "_Progress", found: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
        """Fills `found` with the answers of the terms; the first that is an error ends it, and is returned."""
        for level, terms in self._levels.items():
            at.place, at.term = (at.place[0], level), next(iter(terms))
            async with contextlib.aclosing(self._workers[at.place].answers(check, len(terms))) as answers:
                for at.term in terms:
                    answer = await anext(answers)
                    if "error" in answer:
                        return answer
                    found[at.term] = answer
        return None

    def _score(self, found: dict[str, dict[str, Any]]) -> Score:
        reward, parts = 0.0, {}
        for name, term in self._config.terms.items():
            reward += term.weight * found[name]["value"]
            parts[name] = found[name]["value"]
            parts |= {f"{name}.{key}": value for key, value in found[name]["extra"].items()}
        return Score(reward=reward, parts=parts)

    async def _start_worker(self, place: _Place) -> None:
        """Raises ConfigError with the reason if there is none within START_SECONDS."""
        terms = self._levels[place[1]]
        name = next(iter(terms))
        try:
            worker = self._workers[place] = await WorkerProcess.start(place[1])
            async with asyncio.timeout(START_SECONDS):
                refusal = await worker.set_up(terms, self._memory_bytes)
            if refusal:
                name = refusal["term"]
                raise ConnectionError(refusal["error"])
        except (OSError, TimeoutError, ForgedAnswer) as error:
            await self._kill(place)
            reason = str(error) if str(error) else f"not ready after {START_SECONDS:g} s"
            raise ConfigError([_problem(name, self._config.terms[name], reason)]) from error

    async def _kill(self, place: _Place) -> int | None:
        """Exit status of the worker; None if there is none."""
        worker = self._workers.pop(place, None)
        return None if worker is None else await worker.kill()

    def _require_running(self) -> None:
        if not self._running:
            raise RuntimeError("the reward pool is not running: score between start and close")

    def _failed(self, kind: ErrorKind, path: str, reason: str) -> Score:
        self.error_counts[kind] += 1
        if self.error_counts[kind] == 1:
            logger.warning("a sample could not be scored (further ones of this kind are only counted): %s: %s", path, reason)
        return Score(reward=0.0, error=f"{path}: {reason}")


@dataclass
class _Progress:
    """Where a check is."""

    place: _Place
    term: str

    @property
    def path(self) -> str:
        return f"reward.terms.{self.term}"


def _absolute(term: RewardTerm) -> RewardTerm:
    """The file of a user's function by its full path, since a worker may be started long after the driver changed directory."""
    if term.path is None or not term.path.rpartition(":")[0].endswith(".py"):
        return term
    return dataclasses.replace(term, path=str(Path(term.path).absolute()))


def _problem(name: str, term: RewardTerm, reason: str) -> Problem:
    return Problem(
        path=f"reward.terms.{name}", value=term.path if term.path is not None else term.kind, rule="its verifier must start",
        reason=reason, fix="correct what the reason names; the verifier is built in a process of its own, on this machine",
    )  # fmt: skip
