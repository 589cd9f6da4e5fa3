"""Scores samples in killable worker processes: a verifier that hangs, dies or misbehaves costs one worker, never the run.

score(prompt, text) -> free slot -> its worker (a new one if the last was killed) -> all terms within one deadline -> Score
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections import Counter
from pathlib import Path
from typing import Literal

from moerl.config.schema.data_config import RewardConfig, RewardTerm
from moerl.rewards.answer_channel import ForgedAnswer
from moerl.rewards.reward_process import WorkerProcess
from moerl.rewards.reward_worker import Setup
from moerl.rewards.verifiers import Check
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


class RewardPool:
    """`async with RewardPool(config) as pool: score = await pool.score(prompt, text)`, from one event loop."""

    def __init__(self, config: RewardConfig, *, memory_bytes: int = MEMORY_BYTES):
        self.error_counts: Counter[ErrorKind] = Counter()
        """Samples that could not be scored, since the pool was made."""
        self._config = config
        self._setup = Setup(terms={name: _absolute(term) for name, term in config.terms.items()}, memory_bytes=memory_bytes)
        self._workers: list[WorkerProcess | None] = [None] * config.num_workers
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._running = False

    async def __aenter__(self) -> "RewardPool":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Raises ConfigError if a verifier cannot be built, such as a user's function that cannot be imported."""
        slots = range(len(self._workers))
        try:
            # Waiting for all of them leaves no start under way that `close` would miss.
            outcomes = await asyncio.gather(*(self._start_worker(slot) for slot in slots), return_exceptions=True)
            for error in filter(None, outcomes):
                raise error
        except BaseException:
            await self.close()
            raise
        self._free = asyncio.Queue()
        for slot in slots:
            self._free.put_nowait(slot)
        self._running = True

    async def close(self) -> None:
        """Ends every worker and waits for their exit; safe to call twice and before start. Checks under way get an error."""
        self._running = False
        await asyncio.gather(*(self._kill(slot) for slot in range(len(self._workers))))

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
            await self._kill(slot)
            raise
        finally:
            self._free.put_nowait(slot)

    async def _score_in(self, slot: int, check: Check) -> Score:
        """_WorkerDied if the slot's worker, which is started if there is none, ends before it answers."""
        if self._workers[slot] is None:
            await self._start_worker(slot)
        worker = self._workers[slot]
        assert worker is not None
        terms, parts = self._config.terms, {}
        name, reward = next(iter(terms)), 0.0
        try:
            async with asyncio.timeout(self._config.timeout_seconds), contextlib.aclosing(worker.answers(check, len(terms))) as answers:
                for name, term in terms.items():
                    answer = await anext(answers)
                    if "error" in answer:
                        return self._failed(answer["kind"], f"reward.terms.{name}", answer["error"])
                    reward += term.weight * answer["value"]
                    parts[name] = answer["value"]
                    parts |= {f"{name}.{key}": value for key, value in answer["extra"].items()}
        except TimeoutError:
            await self._kill(slot)
            return self._failed(
                "timeout", f"reward.terms.{name}", f"not done after reward.timeout_seconds={self._config.timeout_seconds:g}"
            )
        except ForgedAnswer as forged:  # not scored again: what forged it may be the response itself
            await self._kill(slot)
            return self._failed("forged", f"reward.terms.{name}", str(forged))
        except ConnectionError as error:
            status = await worker.kill()
            await self._kill(slot)
            raise _WorkerDied(f"reward.terms.{name}", f"{error} (exit status {status})") from error
        return Score(reward=reward, parts=parts)

    async def _start_worker(self, slot: int) -> None:
        """Raises ConfigError with the reason if there is none within START_SECONDS."""
        name = next(iter(self._config.terms))
        try:
            worker = self._workers[slot] = await WorkerProcess.start()
            async with asyncio.timeout(START_SECONDS):
                refusal = await worker.set_up(self._setup)
            if refusal:
                name = refusal["term"]
                raise ConnectionError(refusal["error"])
        except (OSError, TimeoutError, ForgedAnswer) as error:
            await self._kill(slot)
            reason = str(error) if str(error) else f"not ready after {START_SECONDS:g} s"
            raise ConfigError([_problem(name, self._config.terms[name], reason)]) from error

    async def _kill(self, slot: int) -> None:
        worker, self._workers[slot] = self._workers[slot], None
        if worker is not None:
            await worker.kill()

    def _require_running(self) -> None:
        if not self._running:
            raise RuntimeError("the reward pool is not running: score between start and close")

    def _failed(self, kind: ErrorKind, path: str, reason: str) -> Score:
        self.error_counts[kind] += 1
        if self.error_counts[kind] == 1:
            logger.warning("a sample could not be scored (further ones of this kind are only counted): %s: %s", path, reason)
        return Score(reward=0.0, error=f"{path}: {reason}")


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
