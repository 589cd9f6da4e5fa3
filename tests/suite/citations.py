"""What documents cite of the tests: each file is there, each test is defined and runs in a lane of .ci/run."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from lanes import LANES, Lane
from sources import ROOT, TESTS, markers_by_test

_CITED = re.compile(r"(?<![\w./-])(tests/(?:[\w./*-]*[\w/*])?|test_\w+\.py)((?:::\w+)*)")
"""A path from the root, a glob too, or the bare name of a test file, which no other has; then a test's name."""
_SAYS_NOT_RUN = re.compile(r"\b(?:not|none|never)\b[^.;]*\brun\b", re.IGNORECASE)


def problems(text: str, document: str, lanes: Iterable[Lane] = LANES) -> list[str]:
    found = []
    for number, block in _blocks(text):
        for citation in _CITED.finditer(block):
            line = number + block[: citation.start()].count("\n")
            why = _problem(citation[1], citation[2].removeprefix("::"), block, tuple(lanes))
            if why:
                found.append(f"{document}:{line}: {citation[0]}: {why}")
    return found


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and rows of tables, with the numbers of their first lines: what a reader takes for one statement."""
    first, lines = 1, []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("|"):
            yield first, "\n".join(lines)
            first, lines = number, []
        lines.append(line)
    yield first, "\n".join(lines)


def _problem(path: str, name: str, block: str, lanes: tuple[Lane, ...]) -> str | None:
    paths = sorted(ROOT.glob(path) if path.startswith("tests/") else TESTS.rglob(path))
    if not paths:
        return "there is no such file"
    cases = [(file, markers) for file in _test_files(paths) for test, markers in _cases(file) if name in ("", test)]
    if name and not cases:
        return "the file has no such test"
    on_gpu = [markers for _, markers in cases if "gpu" in markers]
    if on_gpu and len(on_gpu) == len(cases):
        return None if _SAYS_NOT_RUN.search(block) else "needs a GPU, which no lane has: the same paragraph must say that it has not run"
    for file, markers in cases:
        cited = file.relative_to(ROOT).as_posix()
        if "gpu" not in markers and not any(lane.in_ci and not lane.is_part and lane.takes(cited, markers) for lane in lanes):
            return f"a test of {cited} with the markers {sorted(markers)} is in no lane that .ci/run runs (tests/suite/lanes.py)"
    return None


def _test_files(paths: list[Path]) -> Iterator[Path]:
    """Of files and folders; helpers and programs that tests start are no tests."""
    for path in paths:
        yield from (path.rglob("test_*.py") if path.is_dir() else [path] if path.match("test_*.py") else [])


def _cases(file: Path) -> Iterator[tuple[str, frozenset[str]]]:
    for name, cases in markers_by_test(file).items():
        yield from ((name, markers) for markers in cases)
