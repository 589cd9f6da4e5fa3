"""A whole run inside one event loop: the real loop, pools, buffer, publisher and observer around the fake trainer and fake engines."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fake_group import FakeTrainGroup

from moerl import loop
from moerl.algorithms.algorithm import build_algorithm
from moerl.config.algorithm_settings import algorithm
from moerl.config.derive.model_configs import routes_to_replay
from moerl.config.derive.scratch_config import VOCAB_SIZE
from moerl.config.schema.data_config import RewardConfig, RewardTerm, TinyData
from moerl.config.schema.model_config import ModelConfig, ScratchModel
from moerl.config.schema.rollout_config import RolloutConfig
from moerl.config.schema.run_config import ObserveConfig, RunConfig
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
from moerl.evaluation.evaluator import Evaluator, evaluation_prompts
from moerl.hangs.hang_reports import HangReports
from moerl.observe.observer import Observer
from moerl.observe.records import metrics_path, read_metrics
from moerl.publish import WeightPublisher
from moerl.residency import Residency
from moerl.rewards.reward_pool import RewardPool
from moerl.rollout.datasets.load_dataset import load_dataset
from moerl.rollout.engines.fake_engine import FakeEngine
from moerl.rollout.fleet.collector import Intake, LocalCollector
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.rollout.group_runner import GroupRunner
from moerl.rollout.prompts import PromptSource
from moerl.rollout.server.limits import Limits
from moerl.run_stop import Stop
from moerl.scratch_model import character_tokenizer
from moerl.server_trust import ServerTrust
from moerl.types.groups import Group, Prompt, Score
from moerl.types.push import TensorSpec
from moerl.types.routes import RouteShape
from moerl.types.stats import StepStats
from moerl.types.stored import Here, Payload, Stored

TENSORS = (TensorSpec(name="a", shape=(3, 5), dtype="float32"), TensorSpec(name="b", shape=(7,), dtype="bfloat16"))
MAX_CONTEXT, SECONDS = 64, 30


def make_config(tmp_path: Path, **changes: Any) -> RunConfig:
    base = RunConfig(
        name="loop",
        num_steps=4,
        groups_per_step=3,
        group_size=4,
        model=ModelConfig(scratch=ScratchModel(), max_context=MAX_CONTEXT),
        data=TinyData(task="repeat", size=25, chat_template=False),
        reward=RewardConfig(terms={"parity": RewardTerm(kind="exact")}),
        algorithm=algorithm("grpo"),
        train=TrainConfig(optimizer=OptimizerConfig(lr=1e-3)),
        rollout=RolloutConfig(engine="fake", max_response_tokens=16),
        observe=ObserveConfig(terminal=False, tensorboard=False, dump_every=0),
        output_dir=str(tmp_path),
        save_every=1,
    )
    return dataclasses.replace(base, **changes)


def parity(prompt: Prompt, text: str) -> Score:
    """0 or 1, about evenly, as a function of the text."""
    return Score(reward=float(sum(map(ord, text)) % 2))


class InProcessScorer:
    """Answers like RewardPool, from a function, after a turn of the event loop."""

    def __init__(self, function: Callable[[Prompt, str], Score]):
        self._function = function

    async def score(self, prompt: Prompt, text: str) -> Score:
        await asyncio.sleep(0)
        return self._function(prompt, text)


class RecordingTrainer(FakeTrainGroup):
    """Notes what happens; `while_updating` runs inside every update, `after_save` after every save."""

    events: list[tuple[str, int]]
    while_updating: Callable[[], Any] | None = None
    after_save: Callable[[int], None] | None = None

    async def update(self, *args: Any, **kwargs: Any) -> StepStats:
        if self.while_updating is not None:
            await self.while_updating()
        stats = await super().update(*args, **kwargs)
        self.events.append(("updated", self.version))
        return stats

    async def save(self, version: int, state: Any) -> None:
        await super().save(version, state)
        if self.after_save is not None:
            self.after_save(version)


class RecordingRunner(GroupRunner):
    events: list[tuple[str, int]]

    async def run(self, prompt: Prompt) -> Group:
        self.events.append(("drawn", prompt.index))
        return await super().run(prompt)


class RecordingPublisher(WeightPublisher):
    events: list[tuple[str, int]]

    async def push(self, version: int) -> Any:
        result = await super().push(version)
        self.events.append(("pushed", version))
        return result


class RecordingObserver(Observer):
    groups: dict[int, list[Group]]

    def step(self, version: int, groups: Sequence[Group], stats: StepStats, **counts: int) -> dict[str, float]:
        self.groups[version] = list(groups)
        return super().step(version, groups, stats, **counts)


def new_engine(
    name: str = "fake-0", kind: type[FakeEngine] = FakeEngine, *, vocab_size: int = VOCAB_SIZE, routes: RouteShape | None = None
) -> FakeEngine:
    expected = {spec.name: spec for spec in TENSORS}
    return kind(name, limits=Limits(max_context=MAX_CONTEXT, vocab_size=vocab_size, routes=routes), expected=expected, max_running=64)


class InProcessRun:
    """`play` once; what happened stays readable, also after a failure."""

    def __init__(
        self, config: RunConfig, *, score: Callable[[Prompt, str], Score] = parity, engines: Sequence[FakeEngine] = (), rewards: Any = None,
        num_shared: int = 0, ends_at: float | None = None, keep: Callable[[Payload], Stored[Payload]] = Here,
        hangs: HangReports | None = None,
    ):  # fmt: skip
        """`num_shared`: the first so many engines are on the trainer's GPUs."""
        self.config, self.num_shared, self._keep = config, num_shared, keep
        self._ends_at, self._hangs = ends_at, hangs
        self.engines = list(engines) if engines else [new_engine()]
        self.events: list[tuple[str, int]] = []
        """("drawn", ticket), ("updated", version), ("pushed", version), in time."""
        self.groups: dict[int, list[Group]] = {}
        """Those that trained each version."""
        self.trainer = RecordingTrainer(
            vocab_size=VOCAB_SIZE,
            tensors=TENSORS,
            checkpoint_dir=config.run_dir / "checkpoints",
            keep=1000,
            mismatch_limit=config.mismatch_limit,
        )
        self._rewards: RewardPool = rewards if rewards is not None else InProcessScorer(score)

    async def play(self) -> None:
        config = self.config
        self.stop = Stop(1.0, ends_at=self._ends_at)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        tokenizer = character_tokenizer(MAX_CONTEXT)
        prompts = PromptSource(
            load_dataset(config.data, seed=config.seed),
            tokenizer,
            config.data,
            seed=config.seed,
            max_context=MAX_CONTEXT,
            max_response_tokens=config.rollout.max_response_tokens,
        )
        pool = RolloutPool(
            self.engines,
            max_running=config.rollout.max_running,
            max_queued=config.rollout.max_queued,
            collector=LocalCollector(Intake(vocab_size=VOCAB_SIZE, decoder=tokenizer, routes=routes_to_replay(config)), keep=self._keep),
            request_seconds=SECONDS,
            max_restarts=config.rollout.max_restarts,
            hangs=self._hangs,
        )
        runner = RecordingRunner(config, pool=pool, rewards=self._rewards, stop_token_ids=())
        residency = self.residency = Residency(self.trainer, pool, num_shared=self.num_shared)
        parts_of_both: dict[str, Any] = {"train": self.trainer, "pool": pool, "residency": residency}
        trust = ServerTrust(config, **parts_of_both, prompts=[prompts.prompt_at(0)], vocab_size=VOCAB_SIZE)
        publisher = RecordingPublisher(config, **parts_of_both, trust=trust)
        algorithm = build_algorithm(config.algorithm, config.rollout.max_response_tokens)
        self.trainer.events = runner.events = publisher.events = self.events
        try:
            async with asyncio.timeout(SECONDS):
                await pool.start()
                await residency.make_room()
                with RecordingObserver(config) as observer:
                    observer.groups = self.groups
                    parts = (config, algorithm, prompts, runner, self.trainer, publisher, trust, residency, observer, self.stop)
                    if config.eval is None:
                        await loop.run(*parts)
                    else:
                        async with Evaluator(
                            config, evaluation_prompts(config, tokenizer), pool=pool, rewards=self._rewards, stop_token_ids=()
                        ) as evaluator:
                            await loop.run(*parts, evaluator)
        finally:
            await pool.close()
            await self.trainer.close()

    def trained(self) -> dict[int, list[int]]:
        """Version -> the tickets of the groups that trained it."""
        return {version: [group.prompt.index for group in groups] for version, groups in self.groups.items()}

    def versions(self, version: int) -> set[int]:
        """Of the weights that sampled any token which trained `version`."""
        completions = [sample.completion for group in self.groups[version] for sample in group.samples]
        return {span.version for completion in completions for span in completion.spans}

    def metrics(self) -> list[dict[str, float]]:
        return read_metrics(metrics_path(self.config.run_dir))


def play(config: RunConfig, **parts: Any) -> InProcessRun:
    run = InProcessRun(config, **parts)
    asyncio.run(run.play())
    return run
