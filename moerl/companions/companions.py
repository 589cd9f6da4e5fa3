"""Models beside the policy, on ranks of their own or on the policy's: asked for what credit is made of, then taught by the same answers.

    logprobs -> scored (values of the critic, log-probs of the model of outcomes) -> credit -> learn -> the policy's update

Each is a train group, a part of every checkpoint, and awake only while it is asked: where it shares the policy's GPUs, train.offload says
what of it leaves them meanwhile.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moerl.algorithms.algorithm import Algorithm
from moerl.algorithms.mini_batch_loss import ValueLossSettings
from moerl.algorithms.outcome_loss import outcome_loss
from moerl.cluster.placement import ProcessPlace
from moerl.companions.companion import Companion, plain
from moerl.companions.distillation import Teaching, refuse_weights
from moerl.config.derive.companion_models import companion_models, makes_room
from moerl.config.schema.algorithm_config import PrimeAdvantage
from moerl.config.schema.run_config import RunConfig
from moerl.hangs.hang_reports import HangReports
from moerl.observe.guards import check_finite
from moerl.train.batching.build_batch import labelled, segments_of
from moerl.train.group import MegatronTrainGroup
from moerl.train.optimizer.learning_rates import learning_rate
from moerl.types.batch import StoredBatch
from moerl.types.errors import DataError
from moerl.types.groups import Group
from moerl.types.stats import StepStats
from moerl.types.stored import keep


class Companions:
    def __init__(
        self, config: RunConfig, *, policy: MegatronTrainGroup, policy_dir: Path, checkpoint_dir: Path,
        places: Mapping[str, Sequence[ProcessPlace]], hangs: HangReports,
    ):  # fmt: skip
        """Part of the policy's checkpoints from here on. `places`: of those with ranks of their own, by name."""
        self._config = config
        options: dict[str, Any] = {"policy": policy, "policy_dir": policy_dir, "checkpoint_dir": checkpoint_dir, "hangs": hangs}
        self._all = {model.name: Companion(config, model, places=places.get(model.name), **options) for model in companion_models(config)}
        self._policy = policy
        self._makes_room = makes_room(config)
        if self._makes_room:
            policy.saver.make_room = policy.shed
        policy.saver.beside.update({name: companion for name, companion in self._all.items() if companion.model.trains})
        self._teaching = None if config.distillation is None else Teaching(config.distillation, policy, self._all)

    async def start(self) -> None:
        """After the policy, which is awake."""
        if self._makes_room:
            await self._policy.shed()
        for companion in self._all.values():
            await companion.start()

    async def load(self) -> None:
        """After the policy, which is awake."""
        if self._makes_room:
            await self._policy.shed()
        for companion in self._all.values():
            await companion.load()

    async def close(self) -> None:
        for companion in self._all.values():
            await companion.group.close()

    async def scored(self, batch: StoredBatch, groups: Sequence[Group], algorithm: Algorithm) -> StoredBatch:
        """With what they say of its tokens."""
        if self._teaching is not None:
            batch = await self._teaching.taught(batch, segments_of(groups, algorithm))
        else:
            refuse_weights(batch)
        if (critic := self._all.get("critic")) is not None:
            async with critic.awake() as group:
                batch = replace(batch, values=await group.values(plain(batch)))
        if (outcome := self._all.get("outcome_model")) is not None:
            asked = plain(batch)
            async with outcome.awake() as group:
                own, initial = await group.logprobs(asked), await group.reference_logprobs(asked)
            process = await asyncio.to_thread(lambda: keep(own.get() - initial.get()))
            batch = replace(batch, process=process, process_reference=initial)
        return batch

    async def learn(self, batch: StoredBatch, groups: Sequence[Group], algorithm: Algorithm, step: int) -> dict[str, float]:
        """From a batch with credit, in the step that follows version `step`; its metrics."""
        told: dict[str, float] = {}
        if (critic := self._all.get("critic")) is not None:
            if batch.returns is None:
                raise DataError("algorithm.advantage returned a Credit without returns_N: must have them, because its needs have values")
            taught = replace(plain(batch), values=batch.values, returns=batch.returns)
            stats = await self._update(critic, taught, ValueLossSettings(clip=self._config.critic.clip), step)
            told |= _critic_metrics(stats)
        if (outcome := self._all.get("outcome_model")) is not None:
            advantage = self._config.algorithm.advantage
            beta = advantage.beta if isinstance(advantage, PrimeAdvantage) else PrimeAdvantage(kind="prime").beta
            right_above = self._config.outcome_model.right_above
            taught = replace(labelled(plain(batch), groups, algorithm, right_above=right_above), reference_logprobs=batch.process_reference)
            stats = await self._update(outcome, taught, outcome_loss(beta), step)
            told |= _outcome_metrics(stats)
        return told

    async def _update(self, companion: Companion, batch: StoredBatch, loss: Any, step: int) -> StepStats:
        optimizer = companion.config.train.optimizer
        async with companion.awake() as group:
            stats = await group.update(batch, loss, lr=learning_rate(step, optimizer, self._config.num_steps))
        check_finite(stats, step=step + 1, on_nonfinite=self._config.train.on_nonfinite, name=companion.model.name)
        return stats


def _common(name: str, stats: StepStats) -> dict[str, float]:
    numbers = {"grad_norm": stats.grad_norm, "lr": stats.learning_rate, "skipped_updates": float(len(stats.skipped_updates))}
    return {f"companion/{name}/{key}": value for key, value in numbers.items()}


def _critic_metrics(stats: StepStats) -> dict[str, float]:
    means = stats.objective
    variance = means["return_squared"] - means["return"] ** 2
    explained = {"critic/explained_variance": 1 - means["error_squared"] / variance} if variance > 1e-12 else {}
    return {
        "critic/loss": stats.loss,
        "critic/value": means["value"],
        "critic/return": means["return"],
        "critic/clipped": means["clipped_values"],
        **explained,
        **_common("critic", stats),
    }


def _outcome_metrics(stats: StepStats) -> dict[str, float]:
    """Shares are of the sequences of updates that were applied: `stats` have no others."""
    means = stats.objective
    return {
        "outcome_model/loss": stats.loss,
        "outcome_model/accuracy": means["told_rightly"] / means["sequences"],
        "outcome_model/right": means["right"] / means["sequences"],
        **_common("outcome_model", stats),
    }
