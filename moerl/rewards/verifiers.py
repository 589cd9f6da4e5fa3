"""Verifiers by `reward.terms.*.kind`: each a function from one `VerifierInput` to a number, made from a `RewardTerm`.

Building one may import heavy packages, so it happens in the worker processes. Any exception of a verifier marks its sample.
"""

import ast
import importlib
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from moerl.config.schema.custom_part import split_path
from moerl.config.schema.data_config import RewardTerm
from moerl.rewards.gym_scorers import disarm_scorers

FUNCTION_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""verl's: f(data_source, solution_str, ground_truth, extra_info) -> float | dict. They are passed by name."""
_MATH_DELIMITER = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
"""A dollar sign after a backslash is money."""
_PERCENT_SIGN = re.compile(r"\\?%")
"""math-verify gives a percentage no value in a box, its number in a formula, and a hundredth of that in plain text; of several it reads
the last alone, and of a mixed number its fraction."""
_REMAINDER = re.compile(r"%\s*(?!and\b|or\b|\\(?:text|mathrm|mbox|quad|right))(?:[\w(]|\\[a-zA-Z])")
"""A percent sign between two operands."""


@dataclass(frozen=True, kw_only=True)  # without slots it is pickled three times as fast
class VerifierInput:
    """One response and what it is judged by; crosses to a worker process."""

    text: str
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any]


Verdict = float | Mapping[str, Any]
"""A finite number, or a mapping whose "score" is one; further numbers in it are reported beside the term."""

Verifier = Callable[[VerifierInput], Verdict]


def _exact(term: RewardTerm) -> Verifier:
    """1 if the response is the ground truth, character by character; else 0."""
    return lambda check: float(check.text == check.ground_truth)


def _prefix(term: RewardTerm) -> Verifier:
    """Share of the ground truth's character positions that the response has right. A dense signal for models that start from nothing."""

    def verify(check: VerifierInput) -> float:
        """In [0, 1]; text beyond the ground truth's length neither adds nor takes."""
        if not check.ground_truth:
            raise ValueError("the ground truth is empty: it has no positions to compare")
        agreeing = sum(said == wanted for said, wanted in zip(check.text, check.ground_truth, strict=False))
        return agreeing / len(check.ground_truth)

    return verify


def _format(term: RewardTerm) -> Verifier:
    """1 if `pattern` matches the whole response, else 0. Python's `re` without flags: write (?s) where "." shall cross lines."""
    if term.pattern is None:
        raise ValueError("kind=format needs a pattern")
    pattern = re.compile(term.pattern)
    return lambda check: float(pattern.fullmatch(check.text) is not None)


def _math(term: RewardTerm) -> Verifier:
    """1 if math-verify finds the response's last answer equal to the ground truth, else 0.

    A ground truth without math delimiters, or with some around what is no answer, is read as LaTeX. With one of percentages the
    response is compared without its percent signs. Boxes that follow each other closely are one answer, the set of them. math-verify's own
    time limits use signals and stop at C code, so they are off: the pool's deadline ends a check.
    """
    from math_verify import parse, verify

    # It warns once per process that its time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def check_answer(check: VerifierInput) -> float:
        truth, text = check.ground_truth, check.text
        if _PERCENT_SIGN.search(truth) and not _REMAINDER.search(truth):
            truth, text = _PERCENT_SIGN.sub(" ", truth), _PERCENT_SIGN.sub(" ", text)
        wanted = parse(truth, parsing_timeout=None) if _MATH_DELIMITER.search(truth) else []
        wanted = wanted or parse(f"\\boxed{{{truth}}}", parsing_timeout=None)
        if not wanted:
            raise ValueError(f"math-verify finds no answer in the ground truth {check.ground_truth!r}")
        said = parse(text, parsing_timeout=None)
        return float(verify(wanted, said, timeout_seconds=None))

    # The parsers are built on first use, which takes longer than a check may.
    check_answer(VerifierInput(text="$x^2$", data_source="", ground_truth="(x)^2", extra_info={}))
    return check_answer


def _gym(term: RewardTerm) -> Verifier:
    """The score a reasoning-gym task gives its own answers, in [0, 1] for most tasks.

    Rows come from `data.kind=gym`: extra_info holds `task`, `args` and `entry`. The answer is the last <answer>...</answer> of the
    response, or all of it. Scorers that would evaluate it as Python read it as a literal or as mathematics (gym_scorers.py).
    """
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    disarm_scorers()

    @lru_cache(maxsize=32)
    def task_of(name: str, args: str) -> Any:
        # Some scorers read the task's settings. One entry is all that is generated.
        return reasoning_gym.create_dataset(name, **json.loads(args) | {"size": 1})

    def verify(check: VerifierInput) -> float:
        if "entry" not in check.extra_info:
            raise ValueError("extra_info has no reasoning-gym entry: this term is for data.kind=gym")
        entry = check.extra_info["entry"]
        task = task_of(check.extra_info["task"], json.dumps(check.extra_info["args"], sort_keys=True))
        answer = extract_answer(check.text)
        try:
            return task.score_answer(answer if answer is not None else check.text.strip(), entry=entry)
        except Exception:
            # Some scorers raise on an answer they cannot read. If this one can read the right answer, the response is wrong.
            task.score_answer(entry["answer"], entry=entry)
            return 0.0

    return verify


def _function(term: RewardTerm) -> Verifier:
    """A user's own function. `path` is `file.py:name` or `package.module:name`."""
    if term.path is None:
        raise ValueError("kind=function needs a path")
    source, name = split_path(term.path)
    module = _module_of_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    function = getattr(module, name)

    def verify(check: VerifierInput) -> Verdict:
        given = (check.data_source, check.text, check.ground_truth, check.extra_info)
        return function(**dict(zip(FUNCTION_ARGUMENTS, given, strict=True)))

    return verify


VERIFIERS: dict[str, Callable[[RewardTerm], Verifier]] = {
    "math": _math, "exact": _exact, "prefix": _prefix, "format": _format, "gym": _gym, "function": _function,
}  # fmt: skip


PURE_KINDS = ("exact", "prefix", "format", "math")
"""Kinds that evaluate nothing, so that they may do without isolation where the machine has none."""


_PREFIX = "moerl_reward_"


def _module_of_file(file: Path) -> ModuleType:
    """Runs `file` as a module that can import its neighbours and that pickle and dataclasses can find again."""
    module_name = f"{_PREFIX}{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    _require_own_neighbours(file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec.loader.exec_module(module)
    return module


def _require_own_neighbours(file: Path) -> None:
    """Raises ImportError where it would get the module of one name that a function in another directory has imported."""
    imports = [node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0}
    folder = file.resolve().parent
    others = {Path(str(module.__file__)).resolve().parent for name, module in sys.modules.items() if name.startswith(_PREFIX)} - {folder}
    for name in sorted({each.partition(".")[0] for each in names} & sys.modules.keys()):
        loaded = Path(getattr(sys.modules[name], "__file__", None) or "/").resolve()
        is_there = (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists()
        if is_there and not loaded.is_relative_to(folder) and any(map(loaded.is_relative_to, others)):
            raise ImportError(f"{file} imports {name}, and its process has that of another function: {loaded}; rename one of them")
