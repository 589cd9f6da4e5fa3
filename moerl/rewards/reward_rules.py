"""Problems that can be known of the reward's settings before the run: runs nobody's code and imports neither torch nor a user's module."""

import ast
import math
import re
import sys
from collections.abc import Iterator
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from moerl.config.schema.custom_part import split_path
from moerl.config.schema.data_config import RewardConfig, RewardTerm
from moerl.rewards.verifiers import FUNCTION_ARGUMENTS, PURE_KINDS
from moerl.rewards.worker_sandbox import missing
from moerl.types.errors import Problem, can_be, problem


def check_reward(config: RewardConfig) -> Iterator[Problem]:
    if not config.terms:
        reason, fix = "the reward is the weighted sum of its terms", "reward.terms.NAME.kind=exact, or another kind"
        yield problem("reward.terms", {}, "needs at least one term", reason, fix)
    for name, term in config.terms.items():
        path = f"reward.terms.{name}"
        if not math.isfinite(term.weight):
            yield problem(f"{path}.weight", term.weight, "must be finite", "it multiplies the term's value", f"{path}.weight=1.0")
        yield from _unused(path, term)
        yield from _isolation(f"{path}.isolation", term)
        if term.kind == "format":
            yield from _pattern(f"{path}.pattern", term.pattern)
        if term.kind == "function":
            yield from _function(f"{path}.path", term.path)


def _unused(path: str, term: RewardTerm) -> Iterator[Problem]:
    for field, kind in (("pattern", "format"), ("path", "function")):
        value = getattr(term, field)
        if value is not None and term.kind != kind:
            fix = f"leave it out, or {path}.kind={kind}"
            yield problem(f"{path}.{field}", value, "has no effect", f"it belongs to kind={kind}", fix)


def _isolation(path: str, term: RewardTerm) -> Iterator[Problem]:
    broken = partial(problem, path, term.isolation)
    if term.kind != "function" and term.isolation == "network":
        yield broken("needs kind=function", "no other kind asks anything of a network", f"{path}=strict, which is the default")
    lacking = missing() if term.kind not in PURE_KINDS and term.isolation != "off" and sys.platform == "linux" else []
    if lacking:
        fix = f"what is missing; or {path}=off, and such checks may do whatever the run may"
        yield broken("cannot be had on this machine", f"it lacks {' and '.join(lacking)}", fix)


def _pattern(path: str, pattern: str | None) -> Iterator[Problem]:
    fix = f"{path}='(?s)<think>.*</think>.*'"
    if pattern is None:
        yield problem(path, None, "must be given for kind=format", "it is matched against the response", fix)
        return
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        yield problem(path, pattern, "must be a regular expression of Python's re", str(error), fix)


def _function(path: str, value: str | None) -> Iterator[Problem]:
    broken, fix = partial(problem, path, value), f"{path}=rewards.py:score, or {path}=package.module:score"
    if value is None:
        yield broken("must be given for kind=function", "it names the function to call", fix)
        return
    try:
        source, name = split_path(value)
    except ValueError:
        yield broken("must be `file.py:name` or `package.module:name`", "the part after the colon is the function's name", fix)
        return
    file = _source_file(source)
    if file is None:
        where = f"looked at {Path(source).absolute()}" if source.endswith(".py") else "it is not on sys.path"
        yield broken("names no module", where, "the path of the file, or an installed module")
        return
    if file.suffix != ".py":
        return  # an extension module: nothing to read; a worker imports it when the run starts
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (OSError, SyntaxError, ValueError) as error:
        yield broken("must be a Python file", str(error), "correct the file")
        return
    if (found := _broken_rule(tree, name)) is not None:
        yield broken(*found, f"def {name}({', '.join(FUNCTION_ARGUMENTS)}) in {file}")


def _source_file(source: str) -> Path | None:
    """The file that holds the module; found without importing it or its parent packages."""
    if source.endswith(".py"):
        return Path(source) if can_be(Path(source)) and Path(source).is_file() else None
    search: list[str] | None = sys.path
    spec: ModuleSpec | None = None
    package = ""
    for part in source.split("."):
        package = f"{package}.{part}" if package else part
        spec = PathFinder.find_spec(package, search)
        if spec is None:
            return None
        search = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def source_files(source: str) -> set[Path]:
    """The file that holds the module, and those in its folder that it imports, or one of these; nothing is imported here. A module that
    lies among all installed packages is one file."""
    first = _source_file(source)
    found, left = ({first}, [first]) if first is not None else (set(), [])
    while left and first is not None and first.parent.name not in ("site-packages", "dist-packages"):
        new = set(_imported_files(left.pop(), first.parent)) - found
        found |= new
        left += new
    return found


def _imported_files(file: Path, folder: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # no Python, or a module that is imported in some cases only
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        module = node.module.split(".") if isinstance(node, ast.ImportFrom) and node.module else []
        base = file.parents[node.level - 1] if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(file.parents) else folder
        for parts in [module, *([*module, *alias.name.split(".")] for alias in node.names)]:
            for length in range(1, len(parts) + 1):
                path = base.joinpath(*parts[:length])
                yield from filter(Path.is_file, (path.with_name(f"{path.name}.py"), path / "__init__.py"))


def _broken_rule(tree: ast.Module, name: str) -> tuple[str, str] | None:
    """The rule and the reason, if the module visibly does not define a callable `name` of verl's signature."""
    found = [node for node in _top_level(tree) if name in _names(node)]
    if not found:
        stars = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in _top_level(tree))
        return None if stars else ("names nothing", f"the module defines no {name} at its top level")
    last = found[-1]
    if getattr(last, "decorator_list", []):
        return None  # what a decorator makes of it cannot be read: other arguments, or a coroutine that it runs
    if isinstance(last, ast.AsyncFunctionDef):
        return "must be a plain function", f"{name} is a coroutine function, and a worker awaits nothing"
    return _broken_signature(last) if isinstance(last, ast.FunctionDef) else None


def _broken_signature(function: ast.FunctionDef) -> tuple[str, str] | None:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    absent = [name for name in FUNCTION_ARGUMENTS if name not in names]
    if absent and arguments.kwarg is None:
        wanted = ", ".join(FUNCTION_ARGUMENTS)
        return "lacks arguments", f"{function.name} is called with {wanted} by name and does not take {', '.join(absent)}"
    num_required = len(arguments.args) - len(arguments.defaults)
    required = [argument.arg for argument in arguments.args[:num_required]]
    required += [a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None]
    further = [name for name in required if name not in FUNCTION_ARGUMENTS]
    return ("needs further arguments", f"nothing passes {', '.join(further)}") if further else None


def _top_level(within: ast.AST) -> Iterator[ast.stmt]:
    """Statements that run at import, those inside if, try and with included."""
    for node in ast.iter_child_nodes(within):
        if isinstance(node, ast.stmt):
            yield node
        # Not into expressions, which hold no statements, and may be nested deeper than Python recurses.
        is_definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)) and not is_definition:
            yield from _top_level(node)


def _names(node: ast.stmt) -> set[str]:
    """Names that `node` binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname if alias.asname is not None else alias.name.partition(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
