"""The RL loop. Read this file first.

    prompts -> runner -> (algorithm keeps or drops) -> GroupBuffer -> batch -> train.update -> weights.push -> release the slots
    whose GPUs:  the servers'                                      |  the trainer's        | both's      |  the servers'

Synchronous is asynchronous with max_staleness = 0: the buffer has (max_staleness + 1) * groups_per_step slots, and a slot is
free again only after the weights that its group trained were pushed. With spare_groups those that take long are drawn anew later.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from moerl.algorithms.algorithm import Algorithm
from moerl.companions.companions import Companions
from moerl.config.derive.eval_settings import is_evaluated
from moerl.config.derive.model_configs import routes_to_replay
from moerl.config.schema.run_config import RunConfig
from moerl.evaluation.evaluator import Evaluator
from moerl.evaluation.results import discard, write_results
from moerl.observe.guards import check_step
from moerl.observe.observer import Observer
from moerl.publish import WeightPublisher
from moerl.residency import Residency
from moerl.rollout.group_producer import new_buffer, producing
from moerl.rollout.group_runner import GroupRunner
from moerl.rollout.prompts import PromptSource
from moerl.run_stop import Stop
from moerl.server_trust import ServerTrust
from moerl.train.batching.build_batch import build_batch, credited, with_proximal
from moerl.train.group import TrainGroup
from moerl.train.optimizer.learning_rates import learning_rate
from moerl.types.batch import StoredBatch
from moerl.types.errors import MoerlError, RunStopped
from moerl.types.groups import Group
from moerl.types.stats import StepStats

logger = logging.getLogger(__name__)


async def run(
    config: RunConfig, algorithm: Algorithm, prompts: PromptSource, runner: GroupRunner, train: TrainGroup, weights: WeightPublisher,
    trust: ServerTrust, residency: Residency, observe: Observer, stop: Stop, evaluator: Evaluator | None = None,
    companions: Companions | None = None,
) -> None:  # fmt: skip
    """Train from the newest checkpoint, or from the start, to `num_steps`; until the run is asked to `stop`, with RunStopped."""
    with observe.phase("load"):
        first_version, state = await _load(train, companions, prompts)
    with observe.phase("push"):
        await weights.push(first_version)
    buffer, routes, algorithm = new_buffer(config, algorithm, state, first_version), routes_to_replay(config), algorithm.resumed(state)
    cursor = buffer.state()
    observe.ask(buffer, weights, residency)
    async with _saving(train, observe), producing(config, algorithm, prompts, runner, buffer):
        for step in range(first_version, config.num_steps):
            try:
                await _evaluate(config, step, evaluator, weights, observe, stop)
                with observe.phase("rollout"):
                    groups = await stop.unless(weights.serve_while(buffer.take(config.groups_per_step)))
            except RunStopped:
                if step > first_version and not _is_saved(config, step):
                    await residency.train(stop.unfinished)
                    await _save(step, cursor, prompts, algorithm, train, observe)
                raise
            batch = build_batch(groups, algorithm, routes, weights.servers, recomputes=config.rollout.partial)
            with observe.phase("switch"):
                asked = await trust.ask(groups, batch)
                await residency.train()
                await trust.compare(asked)
            batch = await _completed(config, step, groups, batch, algorithm, train, companions, observe)
            stats = await _update(config, step, groups, batch, algorithm, train, companions, observe)
            is_refused = trust.refuses(stats, step=step + 1)
            check_step(config, stats, step=step, is_first=step == first_version and not is_refused, is_reference=not state)
            version, cursor = step + 1, buffer.state()
            algorithm = algorithm if is_refused else algorithm.after_step(stats, groups)
            observe.step(version, groups, stats)
            del groups, batch  # with them go their samples in the object store
            if _is_saved(config, version):  # before the push: the trainer then gives up what a checkpoint needs
                await _save(version, cursor, prompts, algorithm, train, observe)
            with observe.phase("push"):
                await weights.push(version)
            buffer.release(config.groups_per_step)  # only now may new groups start
            observe.saved(await train.saved())  # a checkpoint that failed in the background fails here
    if first_version <= config.num_steps:  # else the weights are those of a later step
        await _evaluate(config, config.num_steps, evaluator, weights, observe, stop)


async def _load(train: TrainGroup, companions: Companions | None, prompts: PromptSource) -> tuple[int, dict[str, Any]]:
    version, state = await train.load()
    if companions is not None:
        await companions.load()
    if "drawn" in state:  # else the run begins, perhaps with converted weights
        prompts.refuse_other_data(state)
    return version, state


async def _evaluate(
    config: RunConfig, version: int, evaluator: Evaluator | None, weights: WeightPublisher, observe: Observer, stop: Stop
) -> None:
    """If it is time, and an earlier process of the run has not. Before a step: its groups, of the same weights, may begin meanwhile."""
    if evaluator is None or not is_evaluated(config, version) or observe.has_evaluated(version):
        return
    directory = config.run_dir / "eval" / f"step-{version:06d}"
    discard(directory)  # an earlier process may have come to other weights here
    with observe.phase("eval"):
        results = await stop.unless(weights.serve_while(evaluator.run(directory), "eval"))
    observe.evaluated(version, write_results(directory, results, version=version))


def _is_saved(config: RunConfig, version: int) -> bool:
    return version == config.num_steps or (config.save_every > 0 and version % config.save_every == 0)


async def _save(
    version: int, cursor: Mapping[str, Any], prompts: PromptSource, algorithm: Algorithm, train: TrainGroup, observe: Observer
) -> None:
    with observe.phase("save"):
        await train.save(version, {**cursor, "num_rows": prompts.num_rows, **algorithm.state()})


@asynccontextmanager
async def _saving(train: TrainGroup, observe: Observer) -> AsyncIterator[None]:
    """Wait at the end for the checkpoint that is being written, however the run ends; what ended it stays the cause."""
    try:
        yield
    except BaseException:
        try:
            observe.saved(await train.saved(wait=True))
        except MoerlError as error:
            logger.warning("the run was ending when: %s", error)
        raise
    observe.saved(await train.saved(wait=True))


async def _completed(
    config: RunConfig, step: int, groups: Sequence[Group], batch: StoredBatch, algorithm: Algorithm, train: TrainGroup,
    companions: Companions | None, observe: Observer,
) -> StoredBatch:  # fmt: skip
    """The log-probs the update needs beside the policy's own, by reference, what other models say, and the credit that follows from all."""
    if config.replays_sets:
        batch = replace(batch, replays_sets=True)
    if config.train.old_logprobs == "rollout":
        batch = replace(batch, old_logprobs="rollout")
    if config.train.old_logprobs == "log_linear":
        batch = with_proximal(batch, groups, algorithm, step)
    if config.needs_old_logprobs or config.records_routes:
        with observe.phase("logprobs"):
            logprobs = await train.logprobs(batch, records_routes=config.records_routes)
        if config.needs_old_logprobs:
            batch = replace(batch, old_logprobs=logprobs)
    if config.uses_reference:
        with observe.phase("reference"):
            batch = replace(batch, reference_logprobs=await train.reference_logprobs(batch))
    if companions is not None:
        with observe.phase("companions"):
            batch = await companions.scored(batch, groups, algorithm)
    if config.credits_tokens:
        batch = await asyncio.to_thread(credited, batch, groups, algorithm)
    return batch


async def _update(
    config: RunConfig, step: int, groups: Sequence[Group], batch: StoredBatch, algorithm: Algorithm, train: TrainGroup,
    companions: Companions | None, observe: Observer,
) -> StepStats:  # fmt: skip
    told: dict[str, float] = {}
    if companions is not None:
        with observe.phase("companions"):
            told = await companions.learn(batch, groups, algorithm, step)
    lr = learning_rate(step, config.train.optimizer, config.num_steps) if step >= config.num_critic_steps else 0.0
    with observe.phase("update"):
        stats = await train.update(batch, algorithm.loss, lr=lr)
    return replace(stats, companions=told, **algorithm.state())
