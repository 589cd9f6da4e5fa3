"""From `recipe=... key=value` to a checked `RunConfig`, and back to YAML. Reports every problem of the first stage that has any:
composition, schema, rules across fields."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from moerl.config.compose import compose
from moerl.config.explain import Explainer
from moerl.config.plain import unusable
from moerl.config.rules.facts import Facts, facts_of
from moerl.config.schema.run_config import RunConfig
from moerl.config.validate import validate
from moerl.types.errors import ConfigError, Problem

Check = Callable[[RunConfig, Facts], Iterable[Problem]]

_ADAPTER = TypeAdapter(RunConfig)


def load(overrides: Sequence[str], config_dir: Path | None = None, *, checks: Sequence[Check] = ()) -> RunConfig:
    """The run that `overrides` describe; the first is usually `recipe=NAME`.

    `config_dir` holds recipes and groups of the user's own. `checks` are rules of packages this one may not import (rewards, data).
    Raises ConfigError with every problem.
    """
    return checked(compose(overrides, config_dir), checks)


def checked(plain: Mapping[str, Any], checks: Sequence[Check] = ()) -> RunConfig:
    """The run of composed settings. Raises ConfigError with every problem."""
    config = build(plain)
    facts = facts_of(config.model)
    problems = [problem for check in (validate, *checks) for problem in check(config, facts)]
    if problems:
        raise ConfigError(problems)
    return config


def build(plain: Mapping[str, Any]) -> RunConfig:
    """The typed form of composed settings; types are not converted ("4" is not 4). Raises ConfigError with every problem."""
    given = _given(plain, "")
    problems: list[Problem] = []
    try:
        # By way of JSON: in strict mode pydantic takes lists for tuples and mappings for dataclasses only from there.
        config = _ADAPTER.validate_json(json.dumps(given.value), strict=True)
    except ValidationError as error:
        problems = [_explainer().problem(details) for details in error.errors(include_url=False)]
    unusable_paths = {problem.path for problem in given.unusable}
    problems = [*given.unusable, *(problem for problem in problems if problem.path not in unusable_paths)]
    reported = {problem.path for problem in problems}
    problems += [_explainer().left_open(path) for path in given.open_paths if path not in reported]
    if problems:
        raise ConfigError(problems)
    return config


@cache
def _explainer() -> Explainer:
    return Explainer(_ADAPTER.json_schema())


def to_plain(config: RunConfig) -> dict[str, Any]:
    return _ADAPTER.dump_python(config, mode="json", warnings=False)  # `build` says what is wrong


def to_yaml(config: RunConfig) -> str:
    """Every setting with its value, defaults included; `build(yaml.safe_load(text))` gives the same configuration."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


@dataclass(frozen=True, kw_only=True)
class _Given:
    """The settings that pydantic can look at, and those that it need not."""

    value: Any
    open_paths: list[str]
    """Left open by `???`."""
    unusable: list[Problem]


def _given(value: Any, path: str) -> _Given:
    if not isinstance(value, Mapping):
        return _Given(value=value, open_paths=[], unusable=[])
    left = _Given(value={}, open_paths=[], unusable=[])
    for name, child in value.items():
        child_path = f"{path}.{name}" if path else str(name)
        if child == "???":
            left.open_paths.append(child_path)
        elif (fault := unusable({name: None if isinstance(child, Mapping) else child}, path)) is not None:
            left.unusable.append(fault)
        else:
            inner = _given(child, child_path)
            left.value[name] = inner.value
            left.open_paths.extend(inner.open_paths)
            left.unusable.extend(inner.unusable)
    return left
