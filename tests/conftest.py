"""Settings of the whole test process, made before any test module imports torch; processes that tests start inherit them."""

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# What deals the tests and counts their costs.
sys.path[:0] = [str(Path(__file__).parent / "suite"), str(Path(__file__).parents[1] / "tools")]

pytest_plugins = ["shards", "costs", "forked"]

# Two OpenMP threads on two busy cores spin against each other: 5 to 10 times slower.
os.environ["OMP_NUM_THREADS"] = "1"
# A name that is no local directory must fail at once instead of being looked up on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

# Every Ray of a test process has one token, as the first one that a process joins stays its token; nothing is written into the home.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

# The same examples in every run; no deadline, because a busy machine is no failure.
settings.register_profile("moerl", derandomize=True, deadline=None)
settings.load_profile("moerl")


def pytest_collection_finish() -> None:
    """Refuses test modules that import Megatron when they are collected: tests of their process that patch it first would all fail."""
    if "megatron.core" in sys.modules:
        raise pytest.UsageError(
            "a test module imports megatron.core at its top: import what needs it inside the test, after megatron_patches.activate()"
        )


@pytest.fixture(scope="session", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests run in an empty directory: the checkout may hold runs/, and a configuration that would continue one is checked against it."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@pytest.fixture(scope="session", autouse=True)
def in_this_process() -> Iterator[None]:
    """A command that a test calls as a function forks no driver, as the process in front of it, which is pytest's, would end with it, and
    nothing that imports torch while the settings are read."""
    from moerl.cluster import user_process
    from moerl.cluster.forks import fork_server

    patch = pytest.MonkeyPatch()
    patch.setattr(user_process, "fork_driver", lambda: None)
    patch.setattr(fork_server, "forking", lambda **_: nullcontext())
    yield
    patch.undo()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: server.pem and server.key for IP:127.0.0.1, signed by authority.pem, and another.pem, which signed nothing."""
    from certificates import make_certificates

    directory, other = tmp_path_factory.mktemp("certificates"), tmp_path_factory.mktemp("others")
    for each in (directory, other):
        make_certificates(each)
    (other / "authority.pem").rename(directory / "another.pem")
    return directory


@pytest.fixture
def moerl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """moerl(words): what the command prints and exits with, in this process, which has imported what it needs."""

    from moerl.__main__ import main

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["moerl", *map(str, args)])
        code: Any = 0
        capsys.readouterr()  # what fixtures print, as Ray does of another one on this machine, is not the command's
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(list(map(str, args)), code or 0, printed.out, printed.err)

    return run
