"""What may not change when a run is continued, and why."""

from collections.abc import Mapping
from typing import Any

import yaml

from moerl.config.load import build, to_plain
from moerl.config.problems import NOT_SET, problem
from moerl.config.schema import RunConfig
from moerl.types import Problem

FIXED: Mapping[str, str] = {
    "seed": "the data order and every sampling seed derive from it",
    "model": "the checkpoint holds weights of that model",
    "data": "the checkpoint holds a position in that data set's order",
    "group_size": "the checkpoint holds finished groups of that size",
    "algorithm.name": "the checkpoint's steps were taken with it",
    "sft": "the warm start is over",
    "deterministic": "steps already taken cannot become reproducible",
    "train.dtype": "the checkpoint's optimizer state belongs to it",
    "train.mtp_loss": "the checkpoint holds the layers of multi-token prediction, and their optimizer state, only if they were trained",
    "train.layout": "the checkpoint's optimizer state is cut that way",
}
"""Setting or section -> reason. Everything else may differ from step to step."""


def resume_differences(old_yaml: str, new: RunConfig) -> list[Problem]:
    """The settings of `new` that differ from the run's saved config.yaml and may not. ConfigError if that file is no configuration."""
    old, now = to_plain(build(yaml.safe_load(old_yaml))), to_plain(new)
    return [
        problem(
            path,
            value,
            f"was {before!r} and cannot change when a run is continued",
            reason,
            f"{path}={before}, or another name= (or output_dir=) for a new run",
        )
        for section, reason in FIXED.items()
        for path, before, value in _differences(section, _at(old, section), _at(now, section))
    ]


def _at(plain: Any, path: str) -> Any:
    for name in path.split("."):
        plain = plain[name]
    return plain


def _differences(path: str, before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = list(dict.fromkeys([*before, *now]))
        parts = [_differences(f"{path}.{name}", before.get(name, NOT_SET), now.get(name, NOT_SET)) for name in names]
        return [difference for part in parts for difference in part]
    return [(path, before, now)] if before != now else []
