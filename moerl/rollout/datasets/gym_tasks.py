"""Procedural tasks of reasoning-gym. All `size` entries are made when the run starts: their lengths are checked then."""

import dataclasses
import difflib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from moerl.config.schema.data_config import GymData
from moerl.rollout.datasets.dataset import Row
from moerl.types.errors import DataError, Problem, problem


class GymDataset:
    def __init__(self, config: GymData, seed: int):
        """`args` may set its own seed; the run's is the default."""
        self._task, self._args = config.task, config.args
        self._entries = _entries(config.task, {"seed": _spread(seed)} | config.args | {"size": config.size})

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Row:
        """The extra_info is what the reward of kind=gym reads."""
        entry = self._entries[index]
        # Some tasks have many right answers and name none; their scorer looks at the entry's metadata.
        answer = entry["answer"] if entry["answer"] is not None else ""
        message = {"role": "user", "content": entry["question"]}
        extra_info = {"task": self._task, "args": self._args, "entry": entry}
        return Row(messages=(message,), data_source=f"reasoning_gym/{self._task}", ground_truth=answer, extra_info=extra_info)

    def name_of(self, index: int) -> str:
        return f"reasoning-gym task {self._task}, row {index + 1}"


def _spread(seed: int) -> int:
    """Far from those of its neighbours: tasks make entry i of seed + i, and seeds side by side would share all entries but one."""
    import numpy as np  # not for a check of the settings

    return int(np.random.SeedSequence([seed % 2**64]).generate_state(1)[0]) >> 1


_MAKE_ENTRIES = """
import os, pickle, random, sys
answer = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
sys.path[:], task, args = pickle.load(sys.stdin.buffer)
import reasoning_gym
random.seed(0)
source = reasoning_gym.create_dataset(task, **args)
pickle.dump([source[index] for index in range(args["size"])], answer)
"""


def _entries(task: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Made in a process of their own: some tasks take elements of sets of text in their order, which every process has otherwise
    (PYTHONHASHSEED), or numbers of the generator that all of a process share. Raises DataError."""
    done = subprocess.run(
        [sys.executable, "-c", _MAKE_ENTRIES], input=pickle.dumps((sys.path, task, args)), capture_output=True, check=False,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )  # fmt: skip
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise DataError(f"reasoning-gym could not make the entries of task {task}: {said or f'its process ended with {done.returncode}'}")
    entries: list[dict[str, Any]] = pickle.loads(done.stdout)
    return entries


def check(config: GymData) -> Iterator[Problem]:
    config_class = _quick_config_class(config.task)
    if config_class is None:
        from reasoning_gym.factory import DATASETS

        if config.task not in DATASETS:
            near = difflib.get_close_matches(config.task, DATASETS, n=3, cutoff=0.4)
            fix = f"one of {', '.join(near)}" if near else "a name from reasoning_gym.factory.DATASETS"
            reason = f"the installed reasoning-gym has {len(DATASETS)} tasks, and none of that name"
            yield problem("data.task", config.task, "must be a reasoning-gym task", reason, fix)
            return
        config_class = DATASETS[config.task][1]
    yield from _check_args(config, config_class)


def _quick_config_class(task: str) -> Any:
    """The settings of a task, from its module alone: the package imports every task's, which takes longer than all other checks of a run.
    None if that cannot be had: no source names the task, or its module needs the others."""
    spec = find_spec("reasoning_gym")
    if "reasoning_gym" in sys.modules or spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    named = re.compile(rf'^DATASET_NAME = "{re.escape(task)}"$', re.MULTILINE)
    file = next((file for file in sorted(root.rglob("*.py")) if named.search(file.read_text())), None)
    if file is None:
        return None
    folders = [folder for folder in reversed(file.relative_to(root.parent).parents) if folder.name]
    with _bare_packages({".".join(folder.parts): root.parent / folder for folder in folders}), suppress(ImportError):
        import_module(".".join(file.relative_to(root.parent).with_suffix("").parts))
        return import_module("reasoning_gym.factory").DATASETS[task][1]
    return None


@contextmanager
def _bare_packages(folders: Mapping[str, Path]) -> Iterator[None]:
    """Context in which these packages have imported nothing; then neither they nor their modules have been imported."""
    for name, folder in folders.items():
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(folder)]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
            del sys.modules[name]


def _check_args(config: GymData, config_class: Any) -> Iterator[Problem]:
    names = [field.name for field in dataclasses.fields(config_class) if field.name != "size"]
    unknown = [name for name in config.args if name not in names]
    for name in unknown:
        reason = "the number of rows is data.size" if name == "size" else f"settings of {config.task}: {', '.join(names)}"
        near = difflib.get_close_matches(name, names, n=1)
        fix = "data.size" if name == "size" else f"data.args.{near[0]}" if near else "leave it out"
        yield problem(f"data.args.{name}", config.args[name], "is no setting of this task", reason, fix)
    if unknown:
        return
    try:
        config_class(**config.args).validate()
    except (AssertionError, ValueError, TypeError) as error:
        reason, fix = f"{type(error).__name__}: {error}", f"see reasoning-gym's {config_class.__name__}"
        yield problem("data.args", config.args, "must satisfy the task", reason, fix)
