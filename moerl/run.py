"""Put a run together: directory, model, processes, loop. Whatever ends it, every process it started ends too."""

import asyncio
import contextlib
import fcntl
import gc
import itertools
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import ray

from moerl import canary, loop
from moerl.algorithms.algorithm import build_algorithm
from moerl.cluster.forks.local_ray import Daemon, local_ray
from moerl.cluster.placement import RunPlacement, find_placement
from moerl.cluster.process_log import process_seconds
from moerl.cluster.ray_nodes import reached_at
from moerl.cluster.run_secret import RunSecret
from moerl.cluster.user_process import tell_cause
from moerl.companions.companions import Companions
from moerl.config.derive.companion_models import companion_models
from moerl.config.derive.gpu_map import num_shared
from moerl.config.derive.model_shape import read_config
from moerl.config.derive.object_store import shortage
from moerl.config.derive.rdma import crosses_nodes
from moerl.config.load import to_yaml
from moerl.config.rules.companion_rules import source_problems, tokenizer_problems
from moerl.config.rules.megatron_rules import transformer_engine_problems
from moerl.config.schema.run_config import RunConfig
from moerl.evaluation.estimates import Result
from moerl.evaluation.evaluator import Evaluator, evaluation_prompts
from moerl.evaluation.request import Evaluation
from moerl.evaluation.results import RESULTS, keep_samples_of, write_results
from moerl.hangs.hang_reports import HangReports
from moerl.hangs.python_stacks import answer_stack_requests
from moerl.hardware.network_settings import Setting, applied, find_settings
from moerl.models.plain_tokenizer import Tokenizer
from moerl.observe.failure import chain_of
from moerl.observe.observer import Observer
from moerl.observe.report import write_report
from moerl.planner.compare_run import explained
from moerl.publish import WeightPublisher
from moerl.residency import Residency
from moerl.rewards.reward_pool import RewardPool
from moerl.rollout.build_engines import build_collector, build_engines
from moerl.rollout.datasets.load_dataset import load_dataset
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.rollout.group_runner import GroupRunner
from moerl.rollout.prompts import PromptSource
from moerl.run_stop import Stop, asked_to_stop, require_ahead, run_until_done
from moerl.server_trust import ServerTrust
from moerl.starting_model import RunModel, load_model
from moerl.train.group import MegatronTrainGroup
from moerl.types.errors import ConfigError, HangError, MoerlError, problem
from moerl.types.exit_codes import ExitCode
from moerl.types.groups import Prompt
from moerl.warm_start import warm_start
from moerl.weights.process_rails import ProcessRails, find_process_rails

logger = logging.getLogger(__name__)
T = TypeVar("T")

_NO_GPUS = (Setting(name="CUDA_VISIBLE_DEVICES", value="", reason="placement.device=cpu"),)


def train(config: RunConfig, *, ends_at: float | None = None) -> Path:
    """Run to the end, or from where the newest checkpoint left off; the path of its report. `config` is one that was checked.

    `ends_at`: when the machine is taken away, in seconds since 1970. SIGUSR1 and SIGTERM ask the run to end too. Raises MoerlError,
    which after such an end is RunStopped; leaves no process and no shared memory.
    """
    require_ahead(ends_at)
    with _claimed(config):
        for num_restarts in itertools.count():
            try:
                with Observer(config) as observe:
                    if num_restarts == 0:
                        logger.info("imports and settings took %.1f s", process_seconds())
                    else:
                        observe.notice(
                            f"restart {num_restarts} of {config.deadlines.max_restarts} after a hang, from the newest checkpoint"
                        )
                    with explained(config):
                        run_until_done(_train(config, observe, ends_at))
                break
            except MoerlError as error:
                restarts = _is_hang(error) and config.deadlines.on_hang == "restart"
                if restarts and error.asked_to_end is not None:  # it ends, and who asked may start it again
                    error.exit_code = error.asked_to_end
                    raise
                if not restarts or num_restarts == config.deadlines.max_restarts:
                    raise
        return write_report(config.run_dir)


async def _train(config: RunConfig, observe: Observer, ends_at: float | None) -> None:
    async with _opened(config, observe, ends_at=ends_at) as (model, stop):
        await _train_model(config, model, observe, stop)


async def _train_model(config: RunConfig, model: RunModel, observe: Observer, stop: Stop) -> None:
    others = [companion for companion in companion_models(config) if companion.path is not None]
    if problems := [each for companion in others for each in tokenizer_problems(model.directory, companion)]:
        raise ConfigError(problems)
    evaluates = config.eval is not None and config.eval.every > 0
    prompts, evaluated = _prompts(config, model.tokenizer), evaluation_prompts(config, model.tokenizer) if evaluates else {}
    if config.distillation is not None and (problems := list(source_problems(config.distillation, prompts.data_sources))):
        raise ConfigError(problems)
    async with _assembled(config, model, observe, stop, trained_on=prompts) as run:
        runner = GroupRunner(config, pool=run.pool, rewards=run.rewards, stop_token_ids=model.stop_token_ids)
        trust = run.trust(config, [prompts.prompt_at(index) for index in range(canary.NUM_PROMPTS)])
        algorithm = build_algorithm(config.algorithm, config.rollout.max_response_tokens, trains_rewards=config.trains_rewards)
        try:
            async with run.evaluator(config, evaluated) if evaluates else nullcontext() as evaluator:
                await loop.run(
                    config, algorithm, prompts, runner, run.group, run.publisher(config, trust), trust, run.residency, observe, run.stop,
                    evaluator, run.companions,
                )  # fmt: skip
        finally:
            observe.dump_last()


def evaluate(evaluation: Evaluation) -> tuple[Path, list[Result]]:
    """Evaluate a checkpoint; where the results are, and the results. Its own directory: the run may go on training meanwhile.

    An evaluation that was stopped goes on where it was. Raises MoerlError, as `train`; leaves no process and no shared memory.
    """
    config = evaluation.config
    with _claimed(config, by="evaluating into this directory; wait for it, or choose another --out="):
        keep_samples_of(config.run_dir, evaluation.identity())
        with Observer(config, trains=False) as observe:
            results = run_until_done(_evaluate(evaluation, observe))
    return config.run_dir / RESULTS, results


async def _evaluate(evaluation: Evaluation, observe: Observer) -> list[Result]:
    """The checkpoint goes to the servers as in a run: loaded by the ranks, pushed, compared by digest and canary."""
    config = evaluation.config
    async with AsyncExitStack() as stack:
        model, stop = await stack.enter_async_context(_opened(config, observe))
        prompts = evaluation_prompts(config, model.tokenizer)
        run = await stack.enter_async_context(_assembled(config, model, observe, stop))
        evaluator = await stack.enter_async_context(run.evaluator(config, prompts))
        version = 0
        if evaluation.checkpoint is not None:
            with observe.phase("load"):
                version = await run.group.load_weights(evaluation.checkpoint)
        weights = run.publisher(config, run.trust(config, evaluator.some_prompts()))
        with observe.phase("push"):
            await weights.push(version)
        with observe.phase("eval"):
            results = await run.stop.unless(weights.serve_while(evaluator.run(config.run_dir), "eval"))
    observe.evaluated(version, write_results(config.run_dir, results, version=version, checkpoint=str(evaluation.source)))
    return results


def _is_hang(error: MoerlError) -> bool:
    return any(isinstance(each, HangError) for each in chain_of(error))


def _began_with_a_kill(error: MoerlError) -> bool:
    return any(isinstance(each, MoerlError) and each.exit_code == ExitCode.KILLED for each in chain_of(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assembly:
    """The parts of a run or an evaluation, all of them started."""

    model: RunModel
    secret: RunSecret
    stop: Stop
    pool: RolloutPool
    rewards: RewardPool
    group: MegatronTrainGroup
    residency: Residency
    companions: Companions | None
    rails: ProcessRails | None
    """None: those of the push are not known, or there are none."""

    def trust(self, config: RunConfig, prompts: Sequence[Prompt]) -> ServerTrust:
        vocab_size = read_config(self.model.directory)["vocab_size"]
        return ServerTrust(config, train=self.group, pool=self.pool, residency=self.residency, prompts=prompts, vocab_size=vocab_size)

    def publisher(self, config: RunConfig, trust: ServerTrust) -> WeightPublisher:
        return WeightPublisher(config, train=self.group, pool=self.pool, residency=self.residency, trust=trust, rails=self.rails)

    def evaluator(self, config: RunConfig, prompts: Mapping[str, PromptSource]) -> Evaluator:
        return Evaluator(config, prompts, pool=self.pool, rewards=self.rewards, stop_token_ids=self.model.stop_token_ids)


@asynccontextmanager
async def _opened(config: RunConfig, observe: Observer, *, ends_at: float | None = None) -> AsyncIterator[tuple[RunModel, Stop]]:
    """Ray, and the model, which is read while Ray starts."""
    loading = asyncio.create_task(asyncio.to_thread(load_model, config, dict(os.environ)))
    await asyncio.sleep(0)  # the thread begins: this one is Ray's until that has started
    try:
        with (
            applied(_NO_GPUS if config.placement.device == "cpu" else ()),
            local_ray(config.deadlines.start_seconds) as daemons,
            asked_to_stop(config.checkpoint.reserve_seconds, ends_at=ends_at) as stop,
        ):
            _heed_ends(daemons, stop, observe)
            _heed_signals(stop)  # not earlier: Ray installs a handler of its own, which aborts the process
            yield await loading, stop
    finally:
        await asyncio.gather(loading, return_exceptions=True)


@asynccontextmanager
async def _assembled(
    config: RunConfig, model: RunModel, observe: Observer, stop: Stop, *, trained_on: PromptSource | None = None
) -> AsyncIterator[_Assembly]:
    """Rollout servers, verifiers and train ranks, started together; all of it ended in any case. `trained_on` None: the ranks only hold
    weights."""
    placement = find_placement(config)
    if placement.on_gpus and (problems := list(transformer_engine_problems(config.train))):
        raise ConfigError(problems)
    if trained_on is not None:
        if (said := shortage(config, ray.cluster_resources().get("object_store_memory", 0.0))) is not None:
            logger.warning("%s", said)
        if config.sft is not None:
            directory = await warm_start(config, config.sft, model.directory, model.tokenizer, trained_on, placement.ranks, observe)
            model = replace(model, directory=directory)
    hangs = HangReports(config.run_dir)
    secret = RunSecret.new()
    pool, rewards = _rollout_pool(config, model, secret, placement, hangs), RewardPool(config.reward)
    checkpoint_dir = config.run_dir / "checkpoints"
    group = MegatronTrainGroup(
        config, model_dir=model.directory, checkpoint_dir=checkpoint_dir, places=placement.ranks, hangs=hangs,
        trains=trained_on is not None,
    )  # fmt: skip
    companions = None
    if trained_on is not None:
        companions = Companions(
            config, policy=group, policy_dir=model.directory, checkpoint_dir=checkpoint_dir, places=placement.beside, hangs=hangs
        )
    residency = Residency(group, pool, num_shared=num_shared(config))
    hangs.include_in_pushes(pool.watched)
    hangs.include_in_pushes(lambda: group.watched)
    async with AsyncExitStack() as stack:
        # For the servers, which this process starts; ranks look at the node that Ray chose for them.
        deepep = crosses_nodes(config, "rollout")
        stack.enter_context(applied(find_settings(config.network, "rollout", reached_at=reached_at(), deepep=deepep)))
        for part in (pool, rewards, group):
            stack.push_async_callback(part.close)
        if companions is not None:
            stack.push_async_callback(companions.close)
        with observe.phase("start"):
            if num_shared(config):  # a server takes the memory it finds free
                await _together(pool.start(), rewards.start())
                await residency.make_room()
                await group.start()
            else:
                await _together(pool.start(), rewards.start(), group.start())
            if companions is not None:
                await companions.start()
            rails = await find_process_rails(placement, seconds=config.deadlines.start_seconds)
        stack.enter_context(_frozen_heap())
        yield _Assembly(
            model=model, secret=secret, stop=stop, pool=pool, rewards=rewards, group=group, residency=residency, companions=companions,
            rails=rails,
        )  # fmt: skip


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Else each full collection walks over all that was imported: a third of the driver's CPU in a step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _rollout_pool(config: RunConfig, model: RunModel, secret: RunSecret, placement: RunPlacement, hangs: HangReports) -> RolloutPool:
    rollout = config.rollout
    return RolloutPool(
        build_engines(config, model.directory, config.run_dir / "logs", secret, placement),
        max_running=rollout.max_running,
        max_queued=rollout.max_queued,
        cache_high=rollout.cache_high,
        collector=build_collector(config, model.directory, model.tokenizer, secret, placement=placement),
        request_seconds=config.deadlines.completion_seconds,
        max_restarts=rollout.max_restarts,
        probe_seconds=config.deadlines.probe_seconds,
        command_seconds=config.deadlines.push_seconds,
        hangs=hangs,
        resumes=not config.deterministic,
    )


async def _together(*starts: Any) -> None:
    """All of them, or the first failure after every one has ended."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _claimed(config: RunConfig, *, by: str = "training this run; wait for it, or choose another name=") -> Iterator[None]:
    """The run's directory, for this process alone, with the configuration it started from; a hang ends it as deadlines.on_hang says. `by`:
    what another process that has it is doing, and what to do."""
    answer_stack_requests()
    with _directory(config) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MoerlError(f"{config.run_dir}: another process is {by}") from error
        with _writable(config):
            saved = config.run_dir / "config.yaml"
            temporary = saved.with_suffix(".tmp")
            temporary.write_text(to_yaml(config))
            os.replace(temporary, saved)
        try:
            yield
        except MoerlError as error:
            if _is_hang(error) and config.deadlines.on_hang == "requeue":
                error.exit_code = ExitCode.CONTINUE
            elif error.exit_code == ExitCode.FAILED and _began_with_a_kill(error):
                error.exit_code = ExitCode.KILLED
            raise


def _directory(config: RunConfig) -> IO[str]:
    """The lock of the run's directory, which is made."""
    with _writable(config):
        config.run_dir.mkdir(parents=True, exist_ok=True)
        return (config.run_dir / ".lock").open("w")


@contextmanager
def _writable(config: RunConfig) -> Iterator[None]:
    """Raises ConfigError for what keeps this process from writing into the run's directory."""
    try:
        yield
    except OSError as error:
        reason = f"{error.filename or config.run_dir}: {error.strerror}"
        found = problem(
            "output_dir", config.output_dir, "must be a directory that can be written", reason, "another output_dir=, or make room"
        )
        raise ConfigError([found]) from error


def _prompts(config: RunConfig, tokenizer: Tokenizer) -> PromptSource:
    return PromptSource(
        load_dataset(config.data, seed=config.seed), tokenizer, config.data, seed=config.seed, max_context=config.model.max_context,
        max_response_tokens=config.rollout.max_response_tokens, shown=None if config.distillation is None else config.distillation.shown,
    )  # fmt: skip


def _heed_ends(daemons: Sequence[Daemon], stop: Stop, observe: Observer) -> None:
    """Ray ends this process soon after one of them has ended, without a word: what is to be said is written before anything is ended."""

    def lose(daemon: Daemon) -> None:
        asyncio.get_running_loop().remove_reader(daemon.end)
        if stop.failed is None:
            error = daemon.lost()
            stop.fail(error)
            tell_cause("\n".join([f"moerl: {error}", observe.write_failure(error)]))

    for daemon in daemons:
        asyncio.get_running_loop().add_reader(daemon.end, lose, daemon)


def _heed_signals(stop: Stop) -> None:
    """SIGUSR1 is what schedulers send ahead of the end (Slurm: --signal=B:USR1@300)."""
    for number, exit_code in ((signal.SIGTERM, ExitCode.TERMINATED), (signal.SIGUSR1, ExitCode.CONTINUE)):
        with contextlib.suppress(RuntimeError):  # not the main thread: its owner stops it
            asyncio.get_running_loop().add_signal_handler(number, stop.ask, number.name, exit_code)
