"""YAML files and `key=value` overrides, composed by Hydra into one plain dict. What the keys mean is the schema's business.

A key that no file mentions may be set without Hydra's `+`: the files hold only what differs from the schema's defaults.
"""

import difflib
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from moerl.config.derive.model_configs import shipped_configs
from moerl.config.yaml_files import unreadable_files
from moerl.types.errors import NOT_SET, ConfigError, Problem, problem

NEAR = 0.8
"""How like a name must be to be taken for a slip of the keyboard: gspo is 0.75 like grpo, and another algorithm."""


def options(group: str, config_dir: Path | None = None) -> list[str]:
    """Names that `group=...` may have, e.g. those of every recipe."""
    holders = [root / group for root in _roots(config_dir) if any(child.name == group for child in root.iterdir())]
    return sorted({file.stem for holder in holders for file in holder.glob("*.yaml") if _is_file(file)})


def compose(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Any]:
    """The composed settings; `???` stands where a file leaves a value open.

    `config_dir` holds further groups (recipe/, model/, ...), beside the shipped ones. Raises ConfigError.
    """
    if not __debug__:
        reason, fix = "Hydra reads lists and sections in assertions, which that leaves out", "python without -O, PYTHONOPTIMIZE unset"
        raise ConfigError([problem("python -O", NOT_SET, "must not be given", reason, fix)])
    try:
        Path.cwd()
    except OSError as error:
        reason, fix = "relative paths of the settings mean it", "cd to a directory that is there"
        raise ConfigError([problem("working directory", NOT_SET, "must exist", reason, fix)]) from error
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError([problem("--config-dir", str(config_dir), "is not a directory", "further recipes are read from it", "name one")])
    parsed, problems = _parse(overrides)
    problems += _group_problems(parsed, config_dir)
    if config_dir is not None:
        problems += unreadable_files(config_dir, [str(override.value()) for override in parsed if not override.is_delete()])
    if problems:
        raise ConfigError(problems)
    lines = [_tolerant(override, config_dir) for override in parsed]
    if config_dir is not None:
        folder = QuotedString(text=f"file://{config_dir.resolve()}", quote=Quote.single)
        lines.append(f"hydra.searchpath=[{folder.with_quotes()}]")
    try:
        with _own_hydra():
            composed = OmegaConf.to_container(hydra_compose("config", overrides=lines), resolve=True)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError([_composition_problem(error, _recipe_file(parsed, config_dir))]) from error
    settings: dict[str, Any] = {str(key): value for key, value in composed.items()}  # type: ignore[union-attr]
    file = _recipe_file(parsed, config_dir)
    if "recipe" in settings and file.endswith(".yaml") and "@package" not in Path(file).read_text(encoding="utf-8"):
        # Hydra has put its settings below the group.
        rule, reason = "must begin with # @package _global_", "without that line its settings are none of a run"
        raise ConfigError([problem("recipe", file, rule, reason, "write it as the first line of the file")])
    return settings


_COMPOSING = threading.Lock()


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Hydra of the shipped files. A process has one at a time: other threads wait, and that of the program, which may be Hydra's itself, is
    its own again afterwards."""
    with _COMPOSING:
        of_program, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
        try:
            with initialize_config_dir(str(shipped_configs()), version_base="1.3"):
                yield
        finally:
            GlobalHydra.instance().hydra = of_program


def _recipe_file(parsed: Sequence[Override], config_dir: Path | None) -> str:
    name = next(str(override.value()) for override in reversed(parsed) if override.key_or_group == "recipe")
    files = [root / "recipe" / f"{name}.yaml" for root in _roots(config_dir)]
    return str(next(filter(_is_file, reversed(files)), f"recipe={name}"))


def _roots(config_dir: Path | None) -> list[Path]:
    return [shipped_configs()] if config_dir is None else [shipped_configs(), config_dir]


def _names_file(override: Override, config_dir: Path | None) -> bool:
    """`data=NAME` reads a file; `data={...}` and `data.size=3` are values, as for Hydra itself."""
    key = override.key_or_group
    return key.isidentifier() and bool(options(key, config_dir)) and not isinstance(override.value(), dict)


def _tolerant(override: Override, config_dir: Path | None) -> str:
    is_value = override.type is OverrideType.CHANGE and not _names_file(override, config_dir)
    return f"++{override.input_line}" if is_value else str(override.input_line)


def _parse(overrides: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    parser, parsed, problems = OverridesParser.create(), [], []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError, RecursionError) as error:  # Python's own, of numbers too long and lists too deep
            shown = text if len(text) <= 200 else f"{text[:100]}... ({len(text)} characters)"
            problems.append(_syntax_problem(shown, str(error).splitlines()[0]))
            continue
        if not override.key_or_group:
            problems.append(_syntax_problem(text, "there is no key before ="))
        elif override.is_sweep_override():
            reason = "a command is one run, not a sweep"
            fix = f"{override.key_or_group}=[...] for a list, '{override.key_or_group}=\"...\"' for text"
            problems.append(problem(override.key_or_group, text, "must be one value", reason, fix))
        elif override.key_or_group.split(".")[0] == "hydra":
            reason = "moerl only composes with Hydra; its own settings would change nothing"
            problems.append(problem(override.key_or_group, text, "is not a setting", reason, "leave it out"))
        else:
            parsed.append(override)
    return parsed, problems


def _group_problems(parsed: list[Override], config_dir: Path | None) -> Iterator[Problem]:
    if not any(override.key_or_group == "recipe" for override in parsed):
        reason = "a recipe holds the settings that have no default"
        yield problem("recipe", NOT_SET, "must be named", reason, _one_of("recipe", config_dir))
    chosen = [override for override in parsed if not override.is_delete() and _names_file(override, config_dir)]
    for group, times in Counter(override.key_or_group for override in chosen).items():
        if times > 1:
            names = [override.get_value_element_as_str() for override in chosen if override.key_or_group == group]
            reason = f"one command names {' and '.join(names)}, and a run is made from one of them"
            yield problem(group, names, "must be named once", reason, f"{group}={names[-1]} alone")
    for override in chosen:
        group = override.key_or_group
        value = override.get_value_element_as_str()
        holders = [root for root in _roots(config_dir) if _is_file(root / group / f"{value}.yaml")]
        if not holders:
            near = difflib.get_close_matches(value, options(group, config_dir), n=1, cutoff=NEAR)
            known = _one_of(group, config_dir)
            fix = f"{group}={near[0]}? Known: {known}" if near else known
            yield problem(group, value, f"is not one of the {group} files", f"{group}=NAME reads {group}/NAME.yaml", fix)
        elif len(holders) > 1:
            reason = f"{value}.yaml is in {' and in '.join(str(root / group) for root in holders)}"
            yield problem(group, value, "must be one file", reason, "give your own another name")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, or below a file
        return False


def _one_of(group: str, config_dir: Path | None) -> str:
    return f"{group}= one of " + ", ".join(options(group, config_dir))


def _composition_problem(error: Exception, recipe: str) -> Problem:
    path = getattr(error, "full_key", None) or "configuration"
    if isinstance(error, YAMLError):
        return problem(path, NOT_SET, "must be valid YAML", str(error), "mend the file at that line")
    reason = next(iter(str(error).splitlines()), "")
    if merged := re.match(r"Error merging override \+*([^=]+)=(.*)", reason):
        key, value = merged.groups()
        return problem(
            key, value, "must be a section of settings", f"{recipe} has one there", f"{key}.NAME=VALUE, or '{key}={{NAME: VALUE}}'"
        )
    if isinstance(error, RecursionError):
        rule, reason = "cannot be composed", "a file names itself among its defaults, or one that does"
        return problem("recipe", recipe, rule, reason, "take it out of the defaults of that file")
    reason = reason if reason else f"{type(error).__name__}, of which nothing more is said"
    return problem(path, NOT_SET, "cannot be composed", reason, f"mend the override, or {recipe} and what its defaults name")


def _syntax_problem(text: str, reason: str) -> Problem:
    fix = "section.key=value, lists as [a,b], text with special characters in quotes"
    return problem("override", text, "must read key=value", reason, fix)
