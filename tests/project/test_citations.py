"""What README, docs and CONTRIBUTING say of tests holds: what they cite runs, and the lanes are as stated everywhere."""

import ast
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from citations import problems
from lanes import LANES
from ratchet import Ratchet, gone
from sources import ROOT, TESTS, is_test, markers_by_test

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TESTING = ROOT / "docs" / "testing.md"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_every_test_that_a_document_cites_runs_with_each_change(document):
    assert problems(document.read_text(), str(document.relative_to(ROOT))) == []


def test_every_test_is_in_a_lane_that_ci_runs():
    assert problems("tests/", "the tests") == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("`tests/train/test_gone.py`", "D:1: tests/train/test_gone.py: there is no such file"),
        ("as\n(`test_gone.py`).", "D:2: test_gone.py: there is no such file"),
        ("tests/run/test_none_*.py", "there is no such file"),
        ("tests/project/test_files.py::test_gone", "tests/project/test_files.py::test_gone: the file has no such test"),
        ("tests/gpu/test_push_gpu.py shows it", "must say that it has not run"),
        ("It has not run.\n\ntests/gpu/test_push_gpu.py", "D:3: "),
        ("| it has not run |\n| tests/gpu |", "D:2: tests/gpu: needs a GPU"),
    ],
)
def test_a_citation_of_nothing_and_one_of_what_cannot_run_are_found(text, fault):
    (problem,) = problems(text, "D")
    assert fault in problem


@pytest.mark.parametrize(
    "text",
    [
        "`tests/project/test_files.py::test_no_file_is_too_long`, `test_imports.py`, tests/project/test_*.py and tests/project/.",
        "What tests/train/engine_jobs.py does is no test.",
        "tests/gpu/test_push_gpu.py\nhas not run.",
        "moerl/tests/test_of_another.py is no file of ours, latests/ neither.",
    ],
)
def test_a_citation_of_what_runs_is_no_problem(text):
    assert problems(text, "D") == []


@pytest.mark.parametrize("name", ["test", "real", "engines", "slurm"])
def test_a_citation_of_what_a_lane_outside_ci_alone_runs_is_found(name):
    lanes = [replace(lane, in_ci=lane.in_ci and lane.name != name) for lane in LANES]
    (lane,) = [lane for lane in LANES if lane.name == name]
    (problem,) = problems(f"{lane.paths[0]}/", "D", lanes)
    assert "is in no lane that .ci/run runs" in problem


def test_a_marker_of_some_cases_and_one_through_a_name_are_read(tmp_path):
    source = """
import pytest
pytestmark = [pytest.mark.slurm]
dear = pytest.mark.matrix
CASES = [pytest.param(1, marks=dear), 2]
@pytest.mark.parametrize("case", CASES)
def test_some(case): ...
class TestGroup:
    @pytest.mark.gpu
    @pytest.mark.parametrize("case", [pytest.param(1, marks=[pytest.mark.engine])])
    def test_in_class(self, case): ...
def helper(): ...
"""
    file = tmp_path / "test_markers.py"
    file.write_text(source)
    assert {name: [set(markers) for markers in cases] for name, cases in markers_by_test(file).items()} == {
        "test_some": [{"matrix", "slurm"}, {"slurm"}],
        "TestGroup::test_in_class": [{"engine", "gpu", "slurm"}, {"gpu", "slurm"}],
    }


def recipes() -> dict[str, list[str]]:
    """The commands of every target of the Makefile."""
    commands: dict[str, list[str]] = {}
    for line in (ROOT / "Makefile").read_text().splitlines():
        if header := re.match(r"([a-z0-9-]+):(?!=)", line):
            commands[header[1]] = target = []
        elif line.startswith("\t"):
            target.append(line.strip())
    return commands


def test_the_makefile_runs_each_lane_by_its_markers_and_paths():
    commands = recipes()
    assert {lane.target for lane in LANES} == {name for name in commands if name in ("lint", "docs") or name.startswith("test")}
    for lane in LANES:
        calls = [shlex.split(command) for command in commands.get(lane.target, []) if "-m pytest" in command]
        if lane.paths:
            words = calls[-1][calls[-1].index("pytest") + 1 :]
            marker = words[words.index("-m") + 1] if "-m" in words else ""
            assert (marker, tuple(word for word in words if word.startswith("tests")) or ("tests",)) == (lane.marker, lane.paths), lane.name


def test_ci_runs_the_lanes_that_are_stated_as_such():
    called = set(re.findall(r"\b(?:lane|make(?: --?\S+)*) ([a-z][a-z0-9-]*)", (ROOT / ".ci" / "run").read_text()))
    assert {lane.name for lane in LANES if lane.target in called} == {lane.name for lane in LANES if lane.in_ci}


def section(name: str) -> str:
    return TESTING.read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_testing_md_states_every_lane_its_command_and_whether_ci_runs_it():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| `(?:make )?([^`]+)` \| (yes|no) \|", section("Lanes"), re.MULTILINE)
    assert sorted(rows) == sorted((lane.name, lane.target, "yes" if lane.in_ci else "no") for lane in LANES)


def test_testing_md_names_every_matrix():
    """Also those whose cases a helper marks: a function that makes a parameter set."""
    files = {file: file.read_text() for file in TESTS.rglob("*.py") if file.parent.name != "suite" and file != Path(__file__)}
    helpers = [
        node.name
        for file, text in files.items()
        if "mark.matrix" in text and not file.name.startswith("test_")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and "mark.matrix" in ast.unparse(node)
    ]
    marks = re.compile("|".join([r"mark\.matrix", *(rf"\b{name}\(" for name in helpers)]))
    dealt = [str(file.relative_to(ROOT)) for file, text in files.items() if file.name.startswith("test_") and marks.search(text)]
    assert len(dealt) > 10
    assert [name for name in dealt if name not in section("Matrices")] == []


def test_every_reason_in_the_ratchet_file_is_of_a_test():
    assert [gone(name) for name in Ratchet.read(ROOT).tests if not is_test(name)] == []
