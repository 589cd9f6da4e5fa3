"""From `recipe=... key=value` to a checked `RunConfig`, and back to YAML. Reports every problem of the first stage that has any:
composition, schema, rules across fields."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from moerl.config.compose import compose
from moerl.config.explain import Explainer
from moerl.config.schema import RunConfig
from moerl.config.validate import validate
from moerl.types import ConfigError, Problem

Check = Callable[[RunConfig], Iterable[Problem]]

_ADAPTER = TypeAdapter(RunConfig)


def load(overrides: Sequence[str], config_dir: Path | None = None, *, checks: Sequence[Check] = ()) -> RunConfig:
    """The run that `overrides` describe; the first is usually `recipe=NAME`.

    `config_dir` holds recipes and groups of the user's own. `checks` are rules of packages this one may not import (rewards, data).
    Raises ConfigError with every problem.
    """
    config = build(compose(overrides, config_dir))
    problems = [problem for check in (validate, *checks) for problem in check(config)]
    if problems:
        raise ConfigError(problems)
    return config


def build(plain: Mapping[str, Any]) -> RunConfig:
    """The typed form of composed settings; types are not converted ("4" is not 4). Raises ConfigError with every problem."""
    explainer = Explainer(_ADAPTER.json_schema())
    given, open_paths = _without_open(plain, "")
    problems: list[Problem] = []
    try:
        # By way of JSON: in strict mode pydantic takes lists for tuples and mappings for dataclasses only from there.
        config = _ADAPTER.validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        problems = [explainer.problem(details) for details in error.errors(include_url=False)]
    reported = {problem.path for problem in problems}
    problems += [explainer.left_open(path) for path in open_paths if path not in reported]
    if problems:
        raise ConfigError(problems)
    return config


def to_plain(config: RunConfig) -> dict[str, Any]:
    return _ADAPTER.dump_python(config, mode="json")


def to_yaml(config: RunConfig) -> str:
    """Every setting with its value, defaults included; `build(yaml.safe_load(text))` gives the same configuration."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def _without_open(value: Any, path: str) -> tuple[Any, list[str]]:
    """The settings without those left open by `???`, and the paths of these."""
    if not isinstance(value, Mapping):
        return value, []
    given, open_paths = {}, []
    for name, child in value.items():
        child_path = f"{path}.{name}" if path else str(name)
        if child == "???":
            open_paths.append(child_path)
            continue
        given[name], found = _without_open(child, child_path)
        open_paths += found
    return given, open_paths
