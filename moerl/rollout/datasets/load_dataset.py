"""Data sets by `data.kind`: one file and one row of `_DATASETS` each."""

from collections.abc import Callable, Iterator
from typing import Any

from moerl.config.schema.data_config import DataConfig
from moerl.rollout.datasets import files, gym_tasks, tiny
from moerl.rollout.datasets.rows import Dataset
from moerl.types.errors import Problem

_DATASETS: dict[str, Callable[[Any, int], Dataset]] = {
    "files": files.FileDataset,
    "gym": gym_tasks.GymDataset,
    "tiny": tiny.TinyDataset,
}

_CHECKS: dict[str, Callable[[Any], Iterator[Problem]]] = {
    "files": files.check,
    "gym": gym_tasks.check,
}


def load_dataset(config: DataConfig, *, seed: int) -> Dataset:
    """Raises DataError with every unusable row (the first of them by name) before anything is drawn."""
    return _DATASETS[config.kind](config, seed)


def check_data(config: DataConfig) -> Iterator[Problem]:
    """Problems that can be known without reading the data: files and task names."""
    if config.kind in _CHECKS:
        yield from _CHECKS[config.kind](config)
