"""What part of the tests a change runs: of each matrix (marker `matrix`) one of sixteen groups, drawn by the number of the commit.

`MOERL_SHARD` is `K/16`, `all`, or not set: the commit's own. Cases of a file that share what is dear have a name in common, as in
`matrix("name")`, and so one group. `matrix(turn=0)` and `matrix(turn=1)` are what every second commit runs. With `--part`, files are dealt
in the same way, and their matrices are left out.
"""

import os
import subprocess
import zlib
from pathlib import Path

import pytest

NUM_GROUPS = 16
ROOT = Path(__file__).parents[2]


def group_of(name: str) -> int:
    """The group, 1 to 16, of a file, a test's node id, or cases with a name in common: the same on every machine, whatever is collected."""
    return zlib.crc32(name.encode()) % NUM_GROUPS + 1


def drawn(text: str | None = None) -> int | None:
    """The group that this run takes, None for all: of `K/16` or `all`, or of the number of commits up to HEAD, so that sixteen
    commits in a row see everything. 1 outside of a repository."""
    if text is None or text == "":
        return _commits() % NUM_GROUPS + 1
    if text == "all":
        return None
    group, _, groups = text.partition("/")
    if not (group.isdecimal() and groups == str(NUM_GROUPS) and 1 <= int(group) <= NUM_GROUPS):
        raise pytest.UsageError(f"MOERL_SHARD = {text}: must be all or K/{NUM_GROUPS} with K from 1; it names a group of the matrices")
    return int(group)


def _commits() -> int:
    counted = subprocess.run(["git", "-C", ROOT, "rev-list", "--first-parent", "--count", "HEAD"], capture_output=True, text=True)
    return int(counted.stdout) if counted.returncode == 0 else 0


def fuzzing_seed() -> int:
    """Seed of what fuzzers draw: MOERL_FUZZ_SEED, or that of the commit, so that a commit always draws the same and the next one other
    cases."""
    given = os.environ.get("MOERL_FUZZ_SEED")
    if given:
        return int(given)
    found = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    return int(found.stdout[:8], 16) if found.returncode == 0 else 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", action="store_true", help="run the files of the group that MOERL_SHARD draws, without their matrices")


def pytest_report_header() -> list[str]:
    group = drawn(os.environ.get("MOERL_SHARD"))
    matrices = "matrices: all groups" if group is None else f"matrices: group {group} of {NUM_GROUPS} (MOERL_SHARD=all for all)"
    return [matrices, f"fuzzers: MOERL_FUZZ_SEED={fuzzing_seed()}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    group = drawn(os.environ.get("MOERL_SHARD"))
    if group is None:
        return
    others = [item for item in items if not (_in_part if config.getoption("--part") else _in_group)(item, group)]
    if others:
        config.hook.pytest_deselected(items=others)
        gone = set(others)
        items[:] = [item for item in items if item not in gone]


def _in_group(item: pytest.Item, group: int) -> bool:
    marker = item.get_closest_marker("matrix")
    if marker is not None and "turn" in marker.kwargs:
        return bool(marker.kwargs["turn"] == group % 2)
    return marker is None or group_of("::".join([_file(item), *marker.args]) if marker.args else item.nodeid) == group


def _in_part(item: pytest.Item, group: int) -> bool:
    return item.get_closest_marker("matrix") is None and group_of(_file(item)) == group


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
