"""Scores samples in killable worker processes: a verifier that hangs, dies or misbehaves costs one worker, never the run.

score(prompt, text) -> with others that wait -> free slot -> its workers (new ones if the last were killed) -> Score
"""

import asyncio
import dataclasses
import logging
import math
import pickle
from collections import Counter, deque
from pathlib import Path

from moerl.config.schema.data_config import Isolation, RewardConfig, RewardTerm
from moerl.rewards.verifier_runner import Answers, ErrorKind, Failure, PendingVerdict, VerifierRunner
from moerl.rewards.verifiers import PURE_KINDS, VerifierInput
from moerl.rewards.worker_sandbox import missing
from moerl.types.groups import Prompt, Score

logger = logging.getLogger(__name__)

MEMORY_BYTES = 4 * 2**30
"""Bytes that the checks of one worker may allocate, beyond what its verifiers' packages take."""
MESSAGE_CHECKS = 16
"""Checks of a message, at most: what one that hangs holds up."""
MOST_PARTS = 256
"""Numbers that verifiers report beside their scores, by name, in a run."""
_MESSAGE_BYTES = 2**16
"""Bytes of a message of several: a socket takes them at once, so that nobody writes while nobody reads."""
_MESSAGE_SECONDS = 0.005
"""Seconds that the checks of a message take together, by the pace of the last ones: slower ones are spread over the workers."""


class RewardPool:
    """`async with RewardPool(config) as pool: score = await pool.score(prompt, text)`, from one event loop."""

    def __init__(self, config: RewardConfig, *, memory_bytes: int = MEMORY_BYTES):
        self.error_counts: Counter[ErrorKind] = Counter()
        """Samples that could not be scored, since the pool was made."""
        self._config = config
        self._levels: dict[Isolation, dict[str, RewardTerm]] = {}
        for name, term in config.terms.items():
            self._levels.setdefault(term.isolation, {})[name] = _absolute(term)
        self._slots = [VerifierRunner(config, self._levels, memory_bytes) for _ in range(config.num_workers)]
        self._serving: list[asyncio.Task[None]] = []
        self._waiting: deque[PendingVerdict] = deque()
        self._has_waiting = asyncio.Event()
        self._parts: set[str] = set()
        self._pace = _MESSAGE_SECONDS
        """Seconds of a check, lately."""

    async def __aenter__(self) -> "RewardPool":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Raises ConfigError if a verifier cannot be built, such as a user's function that cannot be imported."""
        self._tell_isolation()
        try:
            # Waiting for all of them leaves no start under way that `close` would miss.
            starts = [slot.start_worker(level) for slot in self._slots for level in self._levels]
            for outcome in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
        except BaseException:
            await self.close()
            raise
        self._serving = [asyncio.create_task(self._serve(slot)) for slot in self._slots]

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
        serving, self._serving = self._serving, []
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        _tell(self._waiting, _not_running())
        self._waiting.clear()
        await asyncio.gather(*(slot.close() for slot in self._slots))

    async def score(self, prompt: Prompt, text: str) -> Score:
        """Never raises for what a verifier does: such a sample has reward 0 and says why in `error`."""
        if not self._serving:
            raise _not_running()
        check = VerifierInput(text=text, data_source=prompt.data_source, ground_truth=prompt.ground_truth, extra_info=prompt.extra_info)
        asked = PendingVerdict(pickle.dumps(check), asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self._has_waiting.set()
        try:
            found = await asked.outcome
        except asyncio.CancelledError:
            asked.give_up()
            raise
        return self._failed(found) if isinstance(found, Failure) else self._score(found)

    async def _serve(self, slot: VerifierRunner) -> None:
        """Runs what waits, for ever."""
        while True:
            while not self._waiting:
                self._has_waiting.clear()
                await self._has_waiting.wait()
            message = self._next_message()
            began = asyncio.get_running_loop().time()
            try:
                await slot.run(message)
            except asyncio.CancelledError:
                _tell(message, _not_running())
                raise
            except Exception as error:
                _tell(message, error)
            pace = (asyncio.get_running_loop().time() - began) / len(message)
            self._pace = (self._pace + pace) / 2

    def _next_message(self) -> list[PendingVerdict]:
        """Each slot's share of what waits, at most."""
        share = math.ceil(len(self._waiting) / len(self._slots))
        most = min(share, MESSAGE_CHECKS, int(_MESSAGE_SECONDS / self._pace))
        message = [self._waiting.popleft()]
        num_bytes = len(message[0].body)
        while self._waiting and len(message) < most and num_bytes + len(self._waiting[0].body) <= _MESSAGE_BYTES:
            message.append(self._waiting.popleft())
            num_bytes += len(message[-1].body)
        return message

    def _score(self, found: Answers) -> Score:
        reward, parts = 0.0, {}
        for name, term in self._config.terms.items():
            reward += term.weight * found[name]["value"]
            parts[name] = found[name]["value"]
            parts |= {path: value for key, value in found[name]["extra"].items() if self._is_reported(path := f"{name}.{key}")}
        if not math.isfinite(reward):  # of terms that are: weights, or the sum, can be too much for a float
            values = ", ".join(f"{term.weight:g} * {found[name]['value']:g} ({name})" for name, term in self._config.terms.items())
            return self._failed(Failure("not_a_number", "reward.terms", f"their sum {values} is {reward}, which is not a finite number"))
        return Score(reward=reward, parts=parts)

    def _is_reported(self, part: str) -> bool:
        """Whether a verifier's number has a metric: names that follow from responses could become as many as these."""
        if part not in self._parts and len(self._parts) < MOST_PARTS:
            self._parts.add(part)
            if len(self._parts) == MOST_PARTS:
                logger.warning("verifiers have named %d numbers beside their scores: others are left out", MOST_PARTS)
        return part in self._parts

    def _failed(self, failure: Failure) -> Score:
        self.error_counts[failure.kind] += 1
        reason = f"{failure.path}: {failure.reason}"
        if self.error_counts[failure.kind] == 1:
            logger.warning("a sample could not be scored (further ones of this kind are only counted): %s", reason)
        return Score(reward=0.0, error=reason)


def _not_running() -> RuntimeError:
    return RuntimeError("the reward pool is not running: score between start and close")


def _tell(message: "deque[PendingVerdict] | list[PendingVerdict]", error: Exception) -> None:
    for asked in message:
        if not asked.outcome.done():
            asked.outcome.set_exception(error)


def _absolute(term: RewardTerm) -> RewardTerm:
    """The file of a user's function by its full path, since a worker may be started long after the driver changed directory."""
    if term.path is None or not term.path.rpartition(":")[0].endswith(".py"):
        return term
    return dataclasses.replace(term, path=str(Path(term.path).absolute()))
