"""Where prompts come from: files in verl's schema, reasoning-gym tasks, tiny tasks. One file and one row of `_DATASETS` each."""

from collections.abc import Callable, Iterator
from typing import Any

from moerl.config.schema import DataConfig
from moerl.rollout.datasets import files, gym, tiny
from moerl.rollout.datasets.rows import Dataset, Row
from moerl.types import Problem

__all__ = ["Dataset", "Row", "check_data", "load_dataset"]

_DATASETS: dict[str, Callable[[Any, int], Dataset]] = {
    "files": files.FileDataset,
    "gym": gym.GymDataset,
    "tiny": tiny.TinyDataset,
}

_CHECKS: dict[str, Callable[[Any], Iterator[Problem]]] = {
    "files": files.check,
    "gym": gym.check,
}


def load_dataset(config: DataConfig, *, seed: int) -> Dataset:
    """Raises DataError with every unusable row (the first of them by name) before anything is drawn."""
    return _DATASETS[config.kind](config, seed)


def check_data(config: DataConfig) -> Iterator[Problem]:
    """What can be known without reading the data: files and task names."""
    if config.kind in _CHECKS:
        yield from _CHECKS[config.kind](config)
