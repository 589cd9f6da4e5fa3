"""Trust in rollout servers: they compute what the trainer computes, or they are retired.

A canary (canary.py) asks them after pushes. Of an update the servers are compared by the tokens that they sampled, and a canary asks those
before it of which there are too few.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from moerl.canary import NUM_TOKENS, Asked, CanaryResult, ask_canary, compare_canary, merged
from moerl.cluster.patient_wait import PatientTimeout
from moerl.config.schema.run_config import RunConfig
from moerl.observe.guards import mismatch_message
from moerl.residency import Residency
from moerl.rollout.fleet.fleet import Member
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.train.batching.micro_batch_plan import split_mini_batches
from moerl.train.group import TrainGroup
from moerl.types.batch import StoredBatch, TrainBatch
from moerl.types.errors import EngineError, EngineUnavailable, GuardError, HangError, MoerlError, WeightError
from moerl.types.groups import Group, Prompt
from moerl.types.stats import MIN_COMPARED, StepStats, disagreeing


class ServerTrust:
    def __init__(
        self, config: RunConfig, *, train: TrainGroup, pool: RolloutPool, residency: Residency, prompts: Sequence[Prompt], vocab_size: int
    ):
        """`prompts`: of canaries. `vocab_size`: of the model, for what servers answer."""
        self._config, self._train, self._residency = config, train, residency
        self._pool, self._fleet = pool, pool.fleet
        self._prompts, self._vocab_size = [prompt.token_ids for prompt in prompts], vocab_size
        self._version, self._num_pushes = 0, 0
        self._compared: set[Member] = set()

    def begin(self, version: int) -> None:
        """Begins a push of `version`: nobody has been compared with it."""
        self._version, self._num_pushes, self._compared = version, self._num_pushes + 1, set()

    @property
    def canary_is_due(self) -> bool:
        """Whether one follows this push."""
        every = self._config.weights.canary_every
        return self._num_pushes == 1 or (every > 0 and self._num_pushes % every == 0)

    async def canary(self, members: Sequence[Member]) -> CanaryResult:
        """Comparison of servers that have just got the version. WeightError, which names them, for those that compute something else;
        EngineError after those that hang were ended."""
        engines, starts = [member.engine for member in members], [member.num_starts for member in members]
        seconds = self._config.deadlines.completion_seconds
        try:
            async with PatientTimeout(seconds):
                asked = await ask_canary(engines, self._prompts, **self._sampling())
        except TimeoutError as error:
            late = await self._end_late(seconds, members, starts)
            raise EngineError(str(late)) from (late if isinstance(late, HangError) else error)
        result = compare_canary(asked, await self._scored(asked.batch), limit=self._config.mismatch_limit)
        self._compared |= set(members)
        return result

    async def ask(self, groups: Sequence[Group], batch: StoredBatch) -> dict[Member, Asked]:
        """Canary's answers, for `compare`, of servers that sampled in `groups` but of which the update compares too few tokens, as in
        asynchronous runs: tokens of older versions differ rightly. Servers that the canary of this version has compared are left out."""
        spans = (span for group in groups for sample in group.samples for each in sample.segments for span in each.spans)
        sources = self._fleet.owners(spans) - self._compared_in(batch) - self._compared
        members = [member for member in self._fleet.serving() if member in sources]
        found = await asyncio.gather(*map(self._asked, members), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return {member: each for member, each in zip(members, found, strict=True) if isinstance(each, Asked)}

    def _compared_in(self, batch: StoredBatch) -> set[Member]:
        """Servers of which the update of `batch` compares enough tokens, in its first mini-batch."""
        fresh = batch.select(split_mini_batches(batch.num_sequences, self._config.train.updates_per_step)[0]).fresh
        if fresh is None:
            return set()
        numbers, num_tokens = fresh[fresh[:, 0] >= 0].T
        counts = np.bincount(numbers, num_tokens)
        return {self._fleet.members[number] for number in np.flatnonzero(counts >= MIN_COMPARED)}

    async def _asked(self, member: Member) -> Asked | None:
        """None of one that ends meanwhile, or is ended because it hangs, or retired for what it answers."""
        before, seconds = {member: member.num_starts}, self._config.deadlines.completion_seconds
        try:
            async with PatientTimeout(seconds):
                return await ask_canary([member.engine], self._prompts, **self._sampling())
        except TimeoutError as error:
            late = await self._end_late(seconds, [member], [before[member]])
            if not await self._fleet.lost(before):
                raise late from error
            return None
        except (EngineError, WeightError) as error:
            if not (isinstance(error, WeightError) and self.retires([member], error)) and not await self._fleet.lost(before):
                raise
            return None

    async def _end_late(self, seconds: float, members: Sequence[Member], starts: Sequence[int]) -> MoerlError:
        """Report about a canary that was not answered, after those that hang, as the processes of these `starts`, were ended."""
        deadline = f"{seconds:g} s (deadlines.completion_seconds)"
        hang = await self._pool.hang(deadline, members)
        if hang is None:
            return EngineError(f"a canary was not answered within {deadline}")
        for member, num_starts in zip(members, starts, strict=True):
            if any(each.name in hang.names for each in member.engine.watched):
                told = EngineUnavailable(f"{member.name}: {hang}")
                told.__cause__, told.origin = hang, hang.origin
                self._fleet.answered_falsely(member, told, starts=num_starts)
        return hang

    async def compare(self, asked: Mapping[Member, Asked]) -> None:
        """The answers with the trainer, which is awake and has not changed its weights since."""
        if not asked:
            return
        by_name = {name: member for member, each in asked.items() for name in each.answers}  # one that came back may have another by now
        together = merged(asked.values())
        try:
            compare_canary(together, (await self._train.logprobs(together.batch)).get(), limit=self._config.mismatch_limit)
        except WeightError as error:
            if not self.retires([by_name[name] for name in error.names], error):
                raise

    def refuses(self, stats: StepStats, *, step: int) -> bool:
        """Whether the update was not applied because servers had other weights than they said: they are retired. GuardError if it is all
        that serve: the trainer may be what is wrong."""
        limit = self._config.mismatch_limit
        members = {self._fleet.members[number]: stats.server_mismatch[number] for number in disagreeing(stats.server_mismatch, limit)}
        if members and not self._fleet.trusted() - set(members):
            told = ", ".join(f"{found.mean:.3g} ({found.num_tokens} tokens of {member.name})" for member, found in members.items())
            raise GuardError(mismatch_message(told, limit, f"update of step {step}"))
        for member, found in members.items():
            said = f"mean |log-prob(trainer) - log-prob(rollout)| = {found.mean:.3g} over {found.num_tokens} tokens of one version"
            rule = f"must be at most weights.mismatch_limit = {limit:.3g}"
            self._fleet.retire(member, EngineError(f"{member.name}: step {step}: {said}: {rule}. The step changed no weight"))
        return bool(members)

    def retires(self, liars: Collection[Member], error: Exception) -> bool:
        """Whether the canary found some of the servers at fault, `liars`, and not all: these end. At the first push it is the run's
        settings."""
        if not liars or self._num_pushes == 1 or not self._fleet.trusted() - set(liars):
            return False
        for member in liars:
            self._fleet.retire(member, EngineError(str(error)))
        return True

    def _sampling(self) -> dict[str, Any]:
        """How a canary is drawn. Prompts of an evaluation leave room for its own answers, which may be shorter than a run's."""
        room = self._config.model.max_context - max(map(len, self._prompts))
        return {
            "max_tokens": min(NUM_TOKENS, self._config.rollout.max_response_tokens, room),
            "version": self._version,
            "vocab_size": self._vocab_size,
            "temperature": self._config.rollout.temperature,
            "seed": self._config.seed,
        }

    async def _scored(self, batch: TrainBatch) -> np.ndarray:
        await self._residency.share()
        logprobs_T = (await self._train.logprobs(batch)).get()
        await self._residency.serve()
        return logprobs_T
