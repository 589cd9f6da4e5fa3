"""Ray's start is tried again, in its time, and one that never comes is one message."""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray

import moerl
from moerl.cluster.forks.fork_server import VARIABLE
from moerl.cluster.forks.local_ray import local_ray
from moerl.cluster.forks.ray_workers import own_ray
from moerl.types.errors import ConfigError, MoerlError
from moerl.types.exit_codes import ExitCode


@pytest.fixture
def failing(monkeypatch):
    """failing(n): the first n starts of Ray leave a process behind and fail, as one whose raylet is slow; the processes."""
    left = []

    def prepare(num):
        def init(*_, **__):
            if len(left) < num:
                left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
                raise Exception("The current node timed out during startup.")

        monkeypatch.setattr(ray, "init", init)
        return left

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield prepare
    for process in left:
        process.kill()
        process.wait()


def test_a_start_that_fails_is_made_again_and_nothing_of_it_is_left(failing):
    left = failing(2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with local_ray(60.0):
            assert len(left) == 2 and not any(process.poll() is None for process in left)
        assert other.poll() is None


def test_a_ray_that_never_comes_is_one_message_and_the_same_command_goes_on(failing):
    failing(9)
    with (
        pytest.raises(MoerlError, match=r"deadlines\.start_seconds = 60: Ray did not start, tried 3 times: .*timed out") as error,
        local_ray(60.0),
    ):
        pass
    assert error.value.exit_code == ExitCode.KILLED


def test_after_its_time_it_is_tried_no_more(failing):
    left = failing(9)
    with pytest.raises(MoerlError, match="tried 1 time:"), local_ray(0.0):
        pass
    assert len(left) == 1


def test_a_cluster_that_cannot_be_joined_is_named_and_tried_once(failing, monkeypatch):
    left = failing(9)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(MoerlError, match=f"RAY_ADDRESS = {address}: .* cannot be joined: .*timed out") as error, local_ray(60.0):
            pass
    assert len(left) == 1 and error.value.exit_code == ExitCode.FAILED


def test_an_address_where_nothing_listens_is_told_before_ray_asks_it(failing, monkeypatch):
    left = failing(9)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(MoerlError, match=r"RAY_ADDRESS = 127\.0\.0\.1:1: .*nothing answers there.*refused"), local_ray(1.0):
        pass
    assert not left


@pytest.mark.parametrize(("name", "rule"), [("x" * 100, "must have at most "), ("file", "must be a directory that can be")])
def test_a_folder_in_which_no_ray_can_start_is_told_before_it_is_tried(failing, monkeypatch, tmp_path, name, rule):
    """Again and again the same command would end the same way."""
    left = failing(9)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    with pytest.raises(ConfigError) as error, local_ray(60.0):
        pass
    [found] = error.value.problems
    assert (found.path, found.value) == ("TMPDIR", str(tmp_path / name)) and rule in found.rule
    assert not left


@pytest.mark.parametrize(("made", "reason"), [(False, "No such file"), (True, "it is empty")])
def test_a_file_for_the_token_that_has_none_is_told_before_ray_is_tried(failing, monkeypatch, tmp_path, made, reason):
    left, file = failing(9), tmp_path / "token"
    if made:
        file.touch()
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    with pytest.raises(ConfigError, match=reason) as error, local_ray(60.0):
        pass
    [found] = error.value.problems
    assert (found.path, found.value) == ("RAY_AUTH_TOKEN_PATH", str(file))
    assert not left


@pytest.mark.parametrize(("runs", "seconds", "asked"), [(True, 60.0, 4), (False, 60.0, 1), (True, 0.0, 1)])
def test_a_node_may_take_the_time_of_the_deadline_while_its_raylet_runs(monkeypatch, runs, seconds, asked):
    from ray._private import services

    calls = []

    def get_node(*_):
        calls.append(1)
        if len(calls) < 4:
            raise RuntimeError("no such node yet")
        return "node"

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr("moerl.cluster.forks.ray_workers._runs", lambda _: runs)
    with own_ray(time.monotonic() + seconds):
        if asked == 4:
            assert services.get_node("address", "id") == "node"
        else:
            with pytest.raises(RuntimeError):
                services.get_node("address", "id")
    assert len(calls) == asked
    assert services.get_node is get_node


def test_a_worker_takes_no_ray_from_the_working_directory(tmp_path):
    (tmp_path / "ray.py").write_text("raise SystemExit('not Ray')\n")
    words = [sys.executable, "-m", "moerl.cluster.forks.ray_worker", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(Path(moerl.__file__).parent.parent)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and "usage: default_worker.py" in done.stdout


HANGS = """
import sys
from ray._private.parameter import RayParams
from moerl.cluster import user_process
from moerl.cluster.forks.local_ray import local_ray

upstream = RayParams.__init__

def with_workers_that_hang(self, *args, **kwargs):
    upstream(self, *args, **kwargs)
    self.worker_path = sys.argv[1]

RayParams.__init__ = with_workers_that_hang
user_process.fork_driver()
with local_ray(15.0):
    pass
"""


def test_a_ray_one_of_whose_processes_hangs_is_ended_at_the_deadline_and_the_command_with_76(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import time; time.sleep(600)")
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "RAY_ADDRESS")}
    done = subprocess.run([sys.executable, "-c", HANGS, worker], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == ExitCode.KILLED, done.stderr
    assert "moerl: deadlines.start_seconds = 15: Ray did not start" in done.stderr
    assert not [each.pid for each in psutil.process_iter(["cmdline"]) if str(worker) in " ".join(each.info.get("cmdline") or [])]


ENDS = """
from ray._private import services
from moerl.cluster.forks.local_ray import local_ray

upstream = services.start_ray_process

def without_gcs(command, *args, **kwargs):
    return upstream(["false"] if "gcs_server" in command[0] else command, *args, **kwargs)

services.start_ray_process = without_gcs
with local_ray(600.0):
    pass
"""


def test_a_gcs_server_that_ends_as_it_starts_is_not_waited_for():
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "RAY_ADDRESS")}
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, env=environment)
    assert "Ray did not start, tried 3 times: gcs_server ended as it started" in done.stderr


def test_a_process_has_one_run_at_a_time_and_none_as_a_fork_of_one_that_had_ray():
    """The other run's Ray is not to be shut down, as of a program's own; and a fork would wait for ever."""

    with local_ray(60.0), ThreadPoolExecutor(1) as thread:
        assert "has another run, in another thread" in thread.submit(refusal).result()
    with multiprocessing.get_context("fork").Pool(1) as fork:
        assert f"is a fork of process {os.getpid()}, in which a run has had Ray" in fork.apply_async(refusal).get(60)


def refusal():
    with pytest.raises(MoerlError) as refused, local_ray(60.0):
        pass
    return str(refused.value)
