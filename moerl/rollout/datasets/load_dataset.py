"""Data sets by `data.kind`: one class and one row of `_DATASETS` each."""

from collections.abc import Callable, Iterator
from typing import Any

from moerl.config.schema.data_config import DataConfig, TinyData
from moerl.rollout.datasets import files, gym_tasks
from moerl.rollout.datasets.dataset import Dataset, Row
from moerl.types.errors import Problem, problem

_REPEATS = 8


class TinyDataset:
    """Tasks small enough to learn from scratch on a laptop, made from the run's seed."""

    def __init__(self, config: TinyData, seed: int):
        import numpy as np  # not for a check of the settings

        self._task = config.task
        # Raw bits of a bit generator are the same in every version of numpy; `integers` may change.
        bits = np.random.Philox(np.random.SeedSequence([seed % 2**64, config.size])).random_raw(2 * config.size)
        self._numbers = bits.reshape(config.size, 2) % 100

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Row:
        left, right = (int(number) for number in self._numbers[index])
        if self._task == "repeat":
            question, answer = f"{left % 10}=", str(left % 10) * _REPEATS
        else:
            question, answer = f"{left}+{right}=", str(left + right)
        message = {"role": "user", "content": question}
        return Row(messages=(message,), data_source=f"tiny/{self._task}", ground_truth=answer, extra_info={"answer": answer})

    def name_of(self, index: int) -> str:
        return f"tiny task {self._task}, row {index + 1}"


_DATASETS: dict[str, Callable[[Any, int], Dataset]] = {
    "files": files.FileDataset,
    "gym": gym_tasks.GymDataset,
    "tiny": TinyDataset,
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
    if not config.chat_template:
        for name, given in (("chat_template_kwargs", config.chat_template_kwargs), ("template_date", config.template_date)):
            if given:
                value, fix = given if isinstance(given, dict) else str(given), "data.chat_template=true, or leave it out"
                yield problem(f"data.{name}", value, "needs data.chat_template=true", "nothing else reads it", fix)
