"""Loading with the checks of every package: what `moerl train` starts from and `moerl check` prints. Imports no torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from moerl.config.load import load
from moerl.config.schema import RunConfig
from moerl.rewards.check import check_reward
from moerl.rollout.datasets import check_data
from moerl.types import Problem


def load_checked(overrides: Sequence[str] | None, config_dir: Path | None = None) -> RunConfig:
    """Raises ConfigError with every problem; see `moerl.config.load.load`."""
    return load(overrides if overrides is not None else (), config_dir, checks=(_data_and_reward,))


def _data_and_reward(config: RunConfig) -> Iterator[Problem]:
    yield from check_data(config.data)
    yield from check_reward(config.reward)
