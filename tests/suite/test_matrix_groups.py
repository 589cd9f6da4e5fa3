"""Matrices are dealt whole: each of their tests is in one group, and sixteen changes in a row run every group."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import shards

TESTS = """
import pytest

@pytest.mark.matrix
@pytest.mark.parametrize("case", range(80))
def test_of_a_matrix(case): ...

@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.matrix(f"fixture {case % 2}")) for case in range(20)])
def test_of_shared_fixtures(case): ...

def test_of_every_change(): ...

@pytest.mark.parametrize("engine", [pytest.param(engine, marks=pytest.mark.matrix(turn=turn)) for turn, engine in enumerate(("a", "b"))])
def test_of_every_second_change(engine): ...
"""


def test_groups_are_of_like_size():
    sizes = Counter(shards.group_of(f"tests/run/test_layouts.py::test_case[{number}]") for number in range(1600))
    assert set(sizes) == set(range(1, 17))
    assert min(sizes.values()) > 60


def test_sixteen_commits_in_a_row_draw_every_group(monkeypatch):
    drawn = []
    for number in range(100, 116):
        monkeypatch.setattr(shards, "_commits", lambda number=number: number)
        drawn.append(shards.drawn())
    assert sorted(drawn) == list(range(1, 17))


@pytest.mark.parametrize("text", ["0/16", "17/16", "1/8", "x", "1"])
def test_a_group_that_is_none_is_refused(text):
    with pytest.raises(pytest.UsageError, match=f"MOERL_SHARD = {text}: must be all or K/16"):
        shards.drawn(text)


def names(tmp_path: Path, shard: str, *options: str) -> set[str]:
    (tmp_path / "test_cases.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", f"--rootdir={tmp_path}", "-p", "shards", *options, "test_cases.py"]
    environment = {"MOERL_SHARD": shard, "PYTHONPATH": str(Path(shards.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, "-W", "ignore"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED), done.stderr
    return {line for line in done.stdout.splitlines() if "::" in line}


@pytest.fixture(scope="module")
def groups(tmp_path_factory) -> list[set[str]]:
    folder = tmp_path_factory.mktemp("groups")
    return [names(folder, f"{number}/16") for number in range(1, 17)]


def test_the_groups_are_disjoint_and_together_the_matrix(groups, tmp_path):
    always = "test_cases.py::test_of_every_change"
    assert all(always in group for group in groups)
    assert sum(len([test for test in group if "every" not in test]) for group in groups) == 100
    assert set().union(*groups) == names(tmp_path, "all")


def test_cases_with_a_name_in_common_are_in_one_group(groups):
    found = [{test for test in group if "shared_fixtures" in test} for group in groups]
    for parity in (0, 1):
        cases = {f"test_cases.py::test_of_shared_fixtures[{case}]" for case in range(parity, 20, 2)}
        assert any(cases <= group for group in found)


def test_two_commits_in_a_row_run_both_turns(groups):
    turns = [{test for test in group if "every_second" in test} for group in groups]
    assert set(map(len, turns)) == {1}
    assert all(one | following == turns[0] | turns[1] for one, following in zip(turns, turns[1:] + turns[:1], strict=True))


def test_a_part_has_files_whole_without_their_matrices(tmp_path):
    parts = [names(tmp_path, f"{number}/16", "--part") for number in range(1, 17)]
    assert sorted(map(len, parts)) == [0] * 15 + [1]
    assert set().union(*parts) == {"test_cases.py::test_of_every_change"}
