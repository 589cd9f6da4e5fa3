"""`moerl end`: the driver is found by the lock it holds, asked with SIGTERM, and waited for; also through Ray."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from moerl.run_stop import driver_of, end_run, end_run_at_head
from moerl.types.errors import CommandError

HOLDS = """
import fcntl, pathlib, signal, sys
lock = pathlib.Path(sys.argv[1], ".lock").open("w")
fcntl.flock(lock, fcntl.LOCK_EX)
def save(*_):
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save if sys.argv[2] == "saves" else signal.SIG_IGN)
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    yield from _held(tmp_path, "saves")


@pytest.fixture
def deaf_driver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    yield from _held(tmp_path, "is deaf")


def _held(run_dir: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(run_dir), how], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


def test_the_driver_is_the_one_that_holds_the_runs_lock(tmp_path: Path, driver):
    assert driver_of(tmp_path) == psutil.Process(driver.pid)
    assert driver_of(tmp_path / "another") is None


def test_a_run_that_is_asked_to_end_saves_and_is_waited_for(tmp_path: Path, driver):
    assert end_run(tmp_path, 30.0) == f"pid {driver.pid} ended"
    assert (tmp_path / "saved").exists()
    assert end_run(tmp_path, 30.0).startswith(f"nothing trains {tmp_path}")


def test_a_path_that_is_no_run_is_no_run_that_has_ended(tmp_path: Path):
    for path in (tmp_path / "nope", Path(__file__)):
        with pytest.raises(CommandError, match="must be a run's directory"):
            end_run(path, 1.0)


def test_a_run_that_does_not_end_in_time_is_left_and_named(tmp_path: Path, deaf_driver):
    assert end_run(tmp_path, 0.2) == f"pid {deaf_driver.pid} did not end within 0.2 s"
    assert deaf_driver.poll() is None


def test_a_node_without_the_driver_asks_the_head_node(tmp_path: Path, driver):
    context = ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    address = context.address_info["gcs_address"]
    try:
        command = [sys.executable, "-m", "moerl", "end", str(tmp_path), "--seconds=30", f"--address={address}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, f"pid {driver.pid} ended\n"), done.stderr
    finally:
        ray.shutdown()
    assert (tmp_path / "saved").exists()


def test_without_ray_nothing_is_waited_for(tmp_path: Path):
    assert end_run_at_head(tmp_path, 30.0, "127.0.0.1:1").startswith("no Ray at 127.0.0.1:1")
    assert "Name or service" not in end_run_at_head(tmp_path, 30.0, "[::1]:1")


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:port"])
def test_an_address_that_is_none_is_refused(tmp_path, address):
    with pytest.raises(CommandError, match="must be HOST:PORT"):
        end_run_at_head(tmp_path, 30.0, address)
