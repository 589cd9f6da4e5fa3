"""Settings of an evaluation where they fall back to those of the run."""

from moerl.config.schema.data_config import EvalDataset, RewardConfig
from moerl.config.schema.run_config import RunConfig


def reward_of(config: RunConfig, dataset: EvalDataset) -> RewardConfig:
    return config.reward if dataset.reward is None else dataset.reward


def max_response_tokens(config: RunConfig) -> int:
    """Longest of an evaluation's completions."""
    assert config.eval is not None
    return config.rollout.max_response_tokens if config.eval.max_response_tokens is None else config.eval.max_response_tokens


def is_evaluated(config: RunConfig, version: int) -> bool:
    """Whether a run that trains evaluates these weights."""
    every = 0 if config.eval is None else config.eval.every
    return every > 0 and (version % every == 0 or version == config.num_steps)
