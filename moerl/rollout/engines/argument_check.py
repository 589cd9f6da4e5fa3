"""Check of an engine's version and of rollout.engine_args, which are held against its own argument parser."""

import argparse
import difflib
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from packaging.specifiers import SpecifierSet

from moerl.rollout.engines.engine_arguments import argument_name, argument_names, as_command_line
from moerl.types.errors import Problem, problem

PATH = "rollout.engine_args"


def version_problems(engine: str, packages: Sequence[str], supported: str) -> list[Problem]:
    """`packages`: the names it is distributed under; the first that is there counts. `supported`: as in pyproject.toml, ">=0.32,<0.34"."""
    found = "none"
    for package in reversed(packages):
        with suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(package).partition("+")[0]
    if found != "none" and found in SpecifierSet(supported, prereleases=True):
        return []
    rule = f"needs {engine}{supported} in {sys.prefix}, which has {found}"
    reason = "moerl starts it with its own functions, and those change between versions"
    return [problem("rollout.python", sys.executable, rule, reason, f"pip install '{engine}{supported}' there")]


class QuietParser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def argument_problems(
    parser: argparse.ArgumentParser, arguments: Mapping[str, Any], *, own: Mapping[str, str], engine: str
) -> list[Problem]:
    """`parser` is a QuietParser with the engine's options. `own`: options that moerl sets, and what to write instead."""
    for action in parser._actions:
        action.required = False  # each argument is parsed by itself
    options = [[argument_name(option) for option in action.option_strings] for action in parser._actions]
    known = argument_names(parser)
    own = {**own, **{name: own[mine] for names in options for mine in own.keys() & set(names) for name in names}}
    return [found for name, value in arguments.items() if (found := _problem(parser, name, value, known, own, engine)) is not None]


def _problem(
    parser: argparse.ArgumentParser, name: str, value: Any, known: set[str], own: Mapping[str, str], engine: str
) -> Problem | None:
    broken = partial(problem, f"{PATH}.{name}", value)
    if name in own:
        return broken("is set by moerl", "the server must agree with the rest of the run", own[name])
    if name not in known:
        nearest = difflib.get_close_matches(name, sorted(known), n=1)
        fix = f"{PATH}.{nearest[0]}" if nearest else "leave it out"
        return broken(f"is no argument of {engine}", "the names are those of its command line, with underscores", fix)
    try:
        parser.parse_args(as_command_line({name: value}, parser))
    except ValueError as error:
        return broken(f"is refused by {engine}", str(error), f"a value that {engine} takes for --{name.replace('_', '-')}")
    return None
