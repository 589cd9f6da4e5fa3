"""From `recipe=... key=value` to a checked `RunConfig`, and back to YAML. Reports every problem of the first stage that has any:
composition, schema, rules across fields."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from moerl.config.compose import compose
from moerl.config.rules.facts import Facts, facts_of
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema_problems import left_open, problem_of
from moerl.config.validate import validate
from moerl.types.errors import ConfigError, Problem, problem

Check = Callable[[RunConfig, Facts], Iterable[Problem]]

_ADAPTER = TypeAdapter(RunConfig)


def load(overrides: Sequence[str], config_dir: Path | None = None) -> RunConfig:
    """The run that `overrides` describe; the first is usually `recipe=NAME`. `config_dir` holds recipes and groups of the user's own.
    Raises ConfigError with every problem."""
    return checked(compose(overrides, config_dir))


def checked(plain: Mapping[str, Any], checks: Sequence[Check] = ()) -> RunConfig:
    """The run of composed settings. `checks` are rules of packages this one may not import (rewards, data). Raises ConfigError with every
    problem."""
    config = build(plain)
    facts = facts_of(config.model)
    problems = [problem for check in (validate, *checks) for problem in check(config, facts)]
    if problems:
        raise ConfigError(problems)
    return config


def build(plain: Mapping[str, Any]) -> RunConfig:
    """The typed form of composed settings; types are not converted ("4" is not 4). Raises ConfigError with every problem."""
    open_paths: list[str] = []
    faults: list[Problem] = []
    found: list[Problem] = []
    try:
        # By way of JSON: in strict mode pydantic takes lists for tuples and mappings for dataclasses only from there.
        config = _ADAPTER.validate_json(json.dumps(_usable(plain, "", open_paths, faults)), strict=True)
    except ValidationError as error:
        found = [problem_of(details) for details in error.errors(include_url=False)]
    unusable_paths = {fault.path for fault in faults}
    problems = [*faults, *(problem for problem in found if problem.path not in unusable_paths)]
    reported = {problem.path for problem in problems}
    problems += [left_open(path) for path in open_paths if path not in reported]
    if problems:
        raise ConfigError(problems)
    return config


def to_plain(config: RunConfig) -> dict[str, Any]:
    """`build` says what is wrong with it, also with objects of a program that no file could hold."""
    try:
        return _ADAPTER.dump_python(config, mode="json", warnings=False)
    except (PydanticSerializationError, UnicodeDecodeError):
        return _ADAPTER.dump_python(config, warnings=False)


def to_yaml(config: RunConfig) -> str:
    """Every setting with its value, defaults included; `build(yaml.safe_load(text))` gives the same configuration."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def _usable(value: Any, path: str, open_paths: list[str], faults: list[Problem]) -> Any:
    """The settings that pydantic can look at; the others go into the lists: `open_paths` are left open by `???`."""
    if not isinstance(value, Mapping):
        return value
    kept = {}
    for name, child in value.items():
        if not isinstance(name, str | int) or isinstance(name, bool):
            faults.append(_no_name(path, name))
            continue
        child_path = f"{path}.{name}" if path else str(name)
        if child == "???":
            open_paths.append(child_path)
        elif (fault := unusable({name: None if isinstance(child, Mapping) else child}, path)) is not None:
            faults.append(fault)
        else:
            kept[name] = _usable(child, child_path, open_paths, faults)
    return kept


LARGEST = 2**63 - 1


def unusable(value: Any, path: str) -> Problem | None:
    """The first thing wrong with it, or with what is in it."""
    match value:
        case bool() | None | float():
            return None
        case int():
            return _too_large(path, value) if abs(value) > LARGEST else None
        case str():
            return None if _is_text(value) else _no_text(path, value)
        case Mapping():
            found = (_of_entry(key, entry, f"{path}.{key}" if path else f"{key}") for key, entry in value.items())
        case list() | tuple():
            found = (unusable(entry, f"{path}.{index}") for index, entry in enumerate(value))
        case _:
            rule = "must be null, true, false, a number, text, a list or a section"
            fix = "the value in quotes, if it is text; in Python int(...) or float(...) of it"
            return problem(path, value, rule, f"it is of the type {type(value).__name__}", fix)
    return next((fault for fault in found if fault is not None), None)


def _of_entry(key: object, value: Any, path: str) -> Problem | None:
    return unusable(value, path) if not isinstance(key, str) or _is_text(key) else _no_text(ascii(path)[1:-1], key)


def _no_name(path: str, name: object) -> Problem:
    reason = f"YAML read it as {type(name).__name__}, and settings have names"
    return problem(path or "configuration", name, "must have text for a name", reason, "the name in quotes, if it is one")


def _too_large(path: str, value: int) -> Problem:
    # Python itself writes no number of more than 4,300 digits.
    shown = value if value.bit_length() < 200 else f"a number of {value.bit_length()} bits"
    return problem(
        path, shown, f"must be at most {LARGEST}", "larger integers fit into no tensor, and no file's header", "a smaller number"
    )


def _no_text(path: str, value: str) -> Problem:
    reason = "some of its bytes are no UTF-8, so that it could be neither written to a file nor printed"
    return problem(path, value, "must be text", reason, "the value in UTF-8")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
