"""Reward settings that cannot work are found before the run, without importing anybody's module."""

import subprocess
import sys
from pathlib import Path

import pytest

from moerl.config.schema.data_config import RewardConfig, RewardTerm
from moerl.rewards.reward_rules import check_reward
from moerl.types.errors import Problem

MODULE = """
raise RuntimeError("this module must not be imported by a check")

def score(data_source, solution_str, ground_truth, extra_info=None): ...
def open_ended(**kwargs): ...
def lacking(solution_str, ground_truth): ...
def greedy(data_source, solution_str, ground_truth, extra_info, tokenizer): ...
async def waiting(data_source, solution_str, ground_truth, extra_info): ...
@with_tokenizer
def decorated(tokenizer, data_source, solution_str, ground_truth, extra_info): ...
@run_until_done
async def awaited(data_source, solution_str, ground_truth, extra_info): ...
assigned = score
try:
    from elsewhere import imported as renamed
except ImportError:
    def conditional(data_source, solution_str, ground_truth, extra_info): ...
match assigned:
    case _:
        def matched(data_source, solution_str, ground_truth, extra_info): ...
class Judge:
    def inner(self): ...
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(MODULE)
    return file


def problems(**term: object) -> list[Problem]:
    return list(check_reward(RewardConfig(terms={"a": RewardTerm(**term)})))


def test_every_kind_with_what_it_needs_is_accepted(module):
    terms = {
        "math": RewardTerm(kind="math"),
        "exact": RewardTerm(kind="exact", weight=-1.0),
        "prefix": RewardTerm(kind="prefix"),
        "gym": RewardTerm(kind="gym"),
        "format": RewardTerm(kind="format", pattern="a+"),
        "function": RewardTerm(kind="function", path=f"{module}:score"),
    }
    assert list(check_reward(RewardConfig(terms=terms))) == []


def test_a_reward_needs_a_term():
    [problem] = check_reward(RewardConfig(terms={}))
    assert problem.path == "reward.terms"


@pytest.mark.parametrize(
    ("term", "path", "said"),
    [
        ({"kind": "exact", "weight": float("nan")}, "reward.terms.a.weight", "must be finite"),
        ({"kind": "exact", "pattern": "a"}, "reward.terms.a.pattern", "has no effect"),
        ({"kind": "math", "path": "a.py:b"}, "reward.terms.a.path", "has no effect"),
        ({"kind": "gym", "isolation": "network"}, "reward.terms.a.isolation", "needs kind=function"),
        ({"kind": "format"}, "reward.terms.a.pattern", "must be given"),
        ({"kind": "format", "pattern": "(a"}, "reward.terms.a.pattern", "regular expression"),
        ({"kind": "function"}, "reward.terms.a.path", "must be given"),
        ({"kind": "function", "path": "own.py"}, "reward.terms.a.path", "file.py:name"),
        ({"kind": "function", "path": "absent.py:score"}, "reward.terms.a.path", "names no module"),
        ({"kind": "function", "path": "no_such_package.module:score"}, "reward.terms.a.path", "names no module"),
        ({"kind": "function", "path": "json.no_such_module:score"}, "reward.terms.a.path", "names no module"),
    ],
)
def test_a_term_that_cannot_work_is_a_problem(term, path, said):
    [problem] = problems(**term)
    assert problem.path == path
    assert said in problem.rule


@pytest.mark.parametrize("name", ["score", "open_ended", "assigned", "renamed", "conditional", "matched", "Judge", "decorated", "awaited"])
def test_a_name_the_module_defines_is_accepted(module, name):
    assert problems(kind="function", path=f"{module}:{name}") == []


@pytest.mark.parametrize(
    ("name", "rule", "reason"),
    [
        ("scores", "names nothing", "defines no scores"),
        ("inner", "names nothing", "at its top level"),
        ("lacking", "lacks arguments", "does not take data_source, extra_info"),
        ("greedy", "needs further arguments", "nothing passes tokenizer"),
        ("waiting", "must be a plain function", "coroutine"),
    ],
)
def test_a_function_that_cannot_be_called_is_a_problem(module, name, rule, reason):
    [problem] = problems(kind="function", path=f"{module}:{name}")
    assert problem.rule == rule
    assert reason in problem.reason
    assert "solution_str" in problem.fix


def test_a_module_of_a_package_is_found_without_importing_it(module, monkeypatch):
    package = module.parent / "checked_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    module.rename(package / "own.py")
    monkeypatch.syspath_prepend(str(package.parent))
    assert problems(kind="function", path="checked_rewards.own:score") == []
    [problem] = problems(kind="function", path="checked_rewards.own:absent")
    assert problem.rule == "names nothing"


def test_names_behind_a_star_import_are_believed(module):
    module.write_text("from elsewhere import *\n")
    assert problems(kind="function", path=f"{module}:score") == []


def test_an_expression_of_any_length_beside_the_function_is_no_problem(module):
    module.write_text(f"{MODULE}\nTABLE = {' + '.join(['1'] * 2000)}\n")
    assert problems(kind="function", path=f"{module}:score") == []


def test_a_file_that_is_not_python_is_a_problem(module):
    module.write_text("def score(:\n")
    [problem] = problems(kind="function", path=f"{module}:score")
    assert problem.rule == "must be a Python file"


def test_the_checks_import_neither_torch_nor_verifiers():
    code = "import sys, moerl.rewards.reward_rules, moerl.rollout.datasets, moerl.config.derive.scratch_config; "
    code += "print([m for m in ('torch', 'transformers', 'math_verify', 'reasoning_gym', 'pyarrow') if m in sys.modules])"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root).stdout == "[]\n"
