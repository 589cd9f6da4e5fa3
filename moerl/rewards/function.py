"""A user's own function, with verl's signature: f(data_source, solution_str, ground_truth, extra_info) -> float | dict.

`path` is `file.py:name` or `package.module:name`. Arguments are passed by name.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from moerl.config.schema.data_config import RewardTerm
from moerl.rewards.verifier import Check, Verdict, Verifier

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def build(term: RewardTerm) -> Verifier:
    if term.path is None:
        raise ValueError("kind=function needs a path")
    function = load_function(term.path)

    def verify(check: Check) -> Verdict:
        return function(
            data_source=check.data_source, solution_str=check.text, ground_truth=check.ground_truth, extra_info=check.extra_info
        )

    return verify


def split_path(path: str) -> tuple[str, str]:
    """("file.py" or "package.module", "name")."""
    source, colon, name = path.rpartition(":")
    if not colon or not source or not name.isidentifier():
        raise ValueError(f"{path!r} is neither `file.py:name` nor `package.module:name`")
    return source, name


def load_function(path: str) -> Callable[..., Verdict]:
    source, name = split_path(path)
    module = _module_of_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    return getattr(module, name)


def _module_of_file(file: Path) -> ModuleType:
    """Runs `file` as a module that can import its neighbours and that pickle and dataclasses can find again."""
    module_name = f"moerl_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec.loader.exec_module(module)
    return module
