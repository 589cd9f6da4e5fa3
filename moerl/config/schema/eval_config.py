"""Settings of evaluations: `eval`."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from moerl.config.schema.data_config import DataConfig, RewardConfig
from moerl.config.schema.strict import NotNegative, Positive, Strict


@dataclass(frozen=True, kw_only=True)
class EvalDataset(Strict):
    data: DataConfig
    """Asked in its own order (shuffle: a function of eval.seed)."""
    reward: RewardConfig | None = None
    """Scorer of its answers. None: the run's reward."""
    num_prompts: Positive | None = None
    """At most so many, the first of its order. None: all."""
    samples: Positive = 1
    """Samples of each prompt: n."""
    pass_at: tuple[Positive, ...] = (1,)
    """Every k of pass@k: the chance that one of k samples passes, estimated from n without bias (arXiv:2107.03374). At most n. For k=1
    it is the share of samples that pass (mean@n)."""
    pass_reward: float | None = None
    """A sample passes with this reward or a higher one. None: with the most that the terms give if each is at most 1."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Strict):
    """Measurements of `moerl eval`, and of a run while it trains."""

    datasets: dict[str, EvalDataset]
    """Data sets by the names that metrics and files have."""
    every: NotNegative = 0
    """Steps between evaluations of a run, which begin before the first step and end after the last; 0: only `moerl eval` evaluates."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0: the likeliest token always, hence one sample of a prompt."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_response_tokens: Positive | None = None
    """None: rollout.max_response_tokens."""
    seed: int = 1
    """Seed of the rows that kind=tiny and kind=gym make up, of the order, and of sampling. Other than the run's, whose rows it trains
    on."""
