"""Stacks of processes that run, are stopped, or have ended, in both ways; and what a process says of itself in its record."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from moerl.hangs.examine import examine, kill, memory_kills
from moerl.hangs.progress import MAX_TEXT, WORK, read_progress
from moerl.hangs.python_stacks import find_py_spy, stacks_of
from moerl.hangs.watched import ProcessId

WAITS = """
import sys, threading
from moerl.hangs.progress import ProgressRecord
from moerl.hangs.python_stacks import answer_stack_requests

def waits_for_ever():
    ProgressRecord().write(0, 1, 7, b"update " + b"x" * 200)
    print("there", flush=True)
    threading.Event().wait()

if sys.argv[1] == "answers":
    answer_stack_requests()
waits_for_ever()
"""


@contextlib.contextmanager
def waiting(how="answers"):
    """A process that waits in a function of a name, and its number."""
    process = subprocess.Popen([sys.executable, "-c", WAITS, how], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"there\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGSTOP])
def test_py_spy_reads_the_stacks_of_a_process_also_while_it_is_stopped(number):
    with waiting() as pid:
        os.kill(pid, number)
        stacks = stacks_of(pid, py_spy=find_py_spy())
        assert (stacks.source, "waits_for_ever" in stacks.text) == ("py-spy", True)
        if number == signal.SIGSTOP:
            assert psutil.Process(pid).status() == "stopped", "as it was found"


def test_where_py_spy_may_not_read_the_process_writes_its_stacks_at_a_signal_each_time(tmp_path):
    """A py-spy that the system refuses."""
    refused = tmp_path / "py-spy"
    refused.write_text("#!/bin/sh\necho Error: Permission denied >&2\nexit 1\n")
    refused.chmod(0o755)
    with waiting() as pid:
        for _ in range(2):
            stacks = stacks_of(pid, py_spy=str(refused))
            assert stacks.source == "faulthandler, at signal SIGUSR2 (py-spy: Error: Permission denied)"
            assert stacks.text.count("in waits_for_ever") == 1
    with waiting() as pid:
        assert stacks_of(pid, py_spy=None).source == "faulthandler, at signal SIGUSR2 (py-spy is not installed)"


def test_a_process_that_never_said_it_would_answer_the_signal_is_not_sent_it():
    """It would end by it."""
    with waiting("silent") as pid:
        assert stacks_of(pid, py_spy=None).source.startswith("none: py-spy is not installed; the process answers no signal")
        assert psutil.Process(pid).status() != "zombie"


def test_a_stopped_process_cannot_answer_the_signal_and_that_is_said():
    with waiting() as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert stacks_of(pid, py_spy=None).source == "none: py-spy is not installed; no answer to signal SIGUSR2 within 2 s"


def test_a_record_is_readable_while_its_process_hangs_and_is_gone_with_it():
    with waiting() as pid:
        os.kill(pid, signal.SIGSTOP)
        line = read_progress(pid)[WORK]
        assert (line.first, line.second, line.text) == (1, 7, ("update " + "x" * 200)[:MAX_TEXT])
        assert time.monotonic() - 60 < line.written <= time.monotonic()
    assert read_progress(pid) == {}


def test_a_process_is_examined_with_those_below_it_and_one_that_is_gone_is_said_to_be():
    with waiting() as pid:
        parent, gone = ProcessId.of(os.getpid()), ProcessId(pid=pid, started=1.0)
        report = examine([parent, gone])
    found = {process.pid: process for process in report.processes[0]}
    assert {os.getpid(), pid} <= found.keys()
    assert "waits_for_ever" in found[pid].stacks.text
    assert found[pid].progress[WORK].second == 7
    assert [process.state for process in report.processes[1]] == ["gone"]
    assert report.gpus


def test_a_stopped_process_is_killed_and_another_one_with_its_number_is_not():
    with waiting() as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        process = psutil.Process(pid)
        kill([ProcessId(pid=pid, started=1.0)])
        assert process.status() == "stopped"
        kill([ProcessId.of(pid)])
        assert process.wait(timeout=20) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("text", "count"),
    [("low 0\nhigh 3\noom 2\noom_kill 2\n", 2), ("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n", 0), ("low 0\n", None), (None, None)],
)
def test_kills_for_memory_are_read_of_both_kinds_of_cgroups(tmp_path, text, count):
    if text is not None:
        (tmp_path / "counter").write_text(text)
    assert memory_kills(tmp_path / "counter") == count


def test_processes_whose_stacks_take_long_do_not_wait_for_each_other(tmp_path, monkeypatch):
    """A stand-in for py-spy that answers when it was asked of three processes."""
    py_spy = tmp_path / "py-spy"
    py_spy.write_text(
        f"#!/bin/sh\ntouch {tmp_path}/asked-$5\nfor _ in $(seq 150); do\n"
        f'  [ "$(ls {tmp_path} | grep -c asked)" -ge 3 ] && echo "stacks of $5" && exit 0\n  sleep 0.1\ndone\nexit 1\n'
    )
    py_spy.chmod(0o755)
    monkeypatch.setattr("moerl.hangs.examine.find_py_spy", lambda: str(py_spy))
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    try:
        report = examine([ProcessId.of(sleeper.pid) for sleeper in sleepers])
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
    assert [found.stacks.text for (found,) in report.processes] == [f"stacks of {sleeper.pid}\n" for sleeper in sleepers]
