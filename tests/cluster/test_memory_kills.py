"""Processes that Ray ends because their node is short of memory are taken for killed, and the message says what the node had."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray.exceptions import OutOfMemoryError

from moerl.cluster.lost_actors import memory_report
from moerl.types.exit_codes import ExitCode


@pytest.fixture(scope="module")
def failures():
    """In a process of its own: this one's Ray has enough memory, and its settings are those of whoever started it."""
    script = Path(__file__).with_name("memory_kills.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("victim", "first", "task"),
    [("rank", "rank 0 of 1 failed in update", "Rank"), ("collector", "a process that receives completions ended", "CollectorActor")],
)
def test_a_process_that_ray_kills_for_memory_ends_the_run_as_killed_and_says_what_its_node_had(failures, victim, first, task):
    failure = failures[victim]
    assert failure["exit_code"] == ExitCode.KILLED
    assert failure["text"].startswith(first)
    assert f"({task}.__init__, " in failure["text"]
    assert len(failure["text"].splitlines()) < 6
    for part in (
        "Ray killed process ",
        "for lack of memory on node ",
        "GB were used",
        "above 0.1% (RAY_memory_usage_threshold)",
        "the largest",
    ):
        assert part in failure["text"]
    assert "Top 10 memory users" in failure["details"]


def test_a_kill_for_memory_that_is_worded_differently_is_told_in_the_first_lines_of_it():
    assert memory_report(OutOfMemoryError("Task was killed\nmemory: 3 GB\nfurther")) == ["Task was killed", "memory: 3 GB"]
