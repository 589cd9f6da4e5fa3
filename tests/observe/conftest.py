"""Groups, stats and settings of a small run, with every number a test may want to choose."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_here import stored_here

from moerl.config.algorithm_settings import algorithm
from moerl.config.schema.data_config import RewardConfig, RewardTerm, TinyData
from moerl.config.schema.model_config import ModelConfig, ScratchModel
from moerl.config.schema.rollout_config import RolloutConfig
from moerl.config.schema.run_config import ObserveConfig, RunConfig
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
from moerl.types.completion import Completion, DraftCounts, FinishReason, VersionSpan
from moerl.types.groups import Group, Prompt, Sample, Score
from moerl.types.stats import StepStats

_NO_DRAFTS = DraftCounts()


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(*, name: str = "run", num_steps: int = 100, **observe: Any) -> RunConfig:
        return RunConfig(
            name=name,
            output_dir=str(tmp_path),
            num_steps=num_steps,
            groups_per_step=2,
            group_size=2,
            model=ModelConfig(scratch=ScratchModel(), max_context=64),
            data=TinyData(task="repeat"),
            reward=RewardConfig(terms={"prefix": RewardTerm(kind="prefix")}),
            algorithm=algorithm("grpo"),
            train=TrainConfig(optimizer=OptimizerConfig(lr=1e-3)),
            rollout=RolloutConfig(max_response_tokens=8),
            observe=ObserveConfig(**{"terminal": False, "tensorboard": False, **observe}),
        )

    return make


@pytest.fixture
def make_stats() -> Callable[..., StepStats]:
    def make(**changes: Any) -> StepStats:
        values = dict(
            loss=0.1, grad_norm=0.5, learning_rate=1e-3, num_tokens=16, entropy=2.0, kl_old=0.0, kl_reference=None, clip_fraction=0.0
        )
        mismatch = dict(mismatch_mean=1e-6, mismatch_max=1e-5, mismatch_kl=1e-9)
        packing = dict(padding_fraction=0.25, rank_imbalance=1.1, round_imbalance=1.2)
        return StepStats(**{**values, **mismatch, **packing, **changes})

    return make


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    def make(
        reward: float = 0.0, *, text: str = "77", name: str = "r", routes: np.ndarray | None = None,
        versions: Sequence[tuple[int, int]] = ((0, 4),), finish: FinishReason = "stop", drafts: DraftCounts = _NO_DRAFTS, **parts: float,
    ) -> Sample:  # fmt: skip
        spans = tuple(VersionSpan(version=version, num_tokens=tokens) for version, tokens in versions)
        length = sum(span.num_tokens for span in spans)
        completion = Completion(
            request_id=name, token_ids=(5,) * length, logprobs=(-0.5,) * length, spans=spans, finish_reason=finish, routes=routes,
            drafts=drafts,
        )  # fmt: skip
        return Sample(completion=stored_here((1, 2), completion, text), score=Score(reward=reward, parts=parts))

    return make


@pytest.fixture
def make_group() -> Callable[..., Group]:
    def make(*samples: Sample, prompt: str = "7:", ground_truth: str = "77777777", errors: tuple[str, ...] = ()) -> Group:
        about = Prompt(index=0, token_ids=(1, 2), text=prompt, data_source="tiny/repeat", ground_truth=ground_truth)
        return Group(prompt=about, samples=samples, errors=errors)

    return make
