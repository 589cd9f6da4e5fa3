"""Processes end by descent: also those whose parent is long gone, and none that somebody else started."""

import subprocess
import sys

import psutil
import pytest

ORPHAN = """
import subprocess
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
print(subprocess.Popen(["sleep", "600"], start_new_session=True, **quiet).pid)
"""
LEADER = f"""
import subprocess, sys
from moerl.cluster.descendants import end_with_parent_alone, no_descendant_outlives
with no_descendant_outlives():
    orphan = subprocess.run([sys.executable, "-c", {ORPHAN!r}], capture_output=True, text=True).stdout
    child = subprocess.Popen(["sleep", "600"], preexec_fn=end_with_parent_alone)
    print(orphan.strip(), child.pid, flush=True)
    sys.stdin.read()
"""


def started() -> "tuple[subprocess.Popen[str], psutil.Process, psutil.Process]":
    leader = subprocess.Popen([sys.executable, "-c", LEADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    orphan, child = map(int, leader.stdout.readline().split())
    return leader, psutil.Process(orphan), psutil.Process(child)


def test_no_descendant_outlives_the_block_and_others_are_left_alone():
    stranger = subprocess.Popen(["sleep", "600"])
    leader, orphan, child = started()
    assert orphan.ppid() == leader.pid
    leader.communicate(timeout=60)
    assert not orphan.is_running()
    assert not child.is_running()
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_child_ends_with_a_parent_that_is_killed_and_not_at_sigterm():
    leader, orphan, child = started()
    child.terminate()
    with pytest.raises(psutil.TimeoutExpired):
        child.wait(timeout=0.5)
    assert child.status() == psutil.STATUS_SLEEPING, "not a zombie, which also takes no end"
    leader.kill()
    leader.communicate(timeout=60)
    child.wait(timeout=60)
    assert not child.is_running()
    orphan.kill()
