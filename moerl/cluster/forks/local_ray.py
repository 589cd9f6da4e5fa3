"""Ray for a run: the cluster of RAY_ADDRESS, or one of this process's own.

A cluster of one host is lost without its control store (gcs_server), its raylet or one of the raylet's two agents: the raylet ends with
them, and Ray ends the driver.
"""

import atexit
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from moerl.cluster.descendants import kill_all
from moerl.cluster.forks.ray_workers import own_ray
from moerl.cluster.user_process import ended_after
from moerl.types.errors import ConfigError, MoerlError, Origin, problem
from moerl.types.exit_codes import ExitCode

logger = logging.getLogger(__name__)

_NUM_TRIES = 3
_SPARE_SECONDS = 5.0
"""After the deadline, for Ray's own word."""
_DAEMONS = ("gcs_server", "raylet")
CONNECT_SECONDS = 10.0
_SOCKET_PATH = 107
"""Bytes of a socket's path, at most (unix(7))."""
_RUN = threading.Lock()
"""Held by the run of this process that has Ray: a process is in one cluster."""
_had_ray: int | None = None
"""The process in which a run of this program has had Ray."""
TOKENS = "a cluster with a token answers only those that have it (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN)"
"""Reason, perhaps, why a cluster cannot be joined: Ray's own words do not name it."""
_AGENTS = {"ray::DashboardAgent": "dashboard agent", "ray::RuntimeEnvAgent": "agent for runtime environments"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """A process of Ray's without which the run cannot go on."""

    name: str
    pid: int
    end: int
    """A file that becomes readable when it ends."""

    def lost(self) -> MoerlError:
        """Error of the run when it has ended."""
        error = MoerlError(
            f"Ray's {self.name} (process {self.pid}) ended, and Ray cannot go on without it: it was killed, or crashed\n"
            "The newest checkpoint has everything to go on from; the same command resumes"
        )
        error.exit_code = ExitCode.KILLED
        return error.began_in(Origin(who=f"Ray's {self.name}", node=socket.gethostname(), doing=""))


@contextmanager
def local_ray(start_seconds: float) -> Iterator[list[Daemon]]:
    """The cluster of RAY_ADDRESS, or one of this process's own that ends with it (also when it is killed): its daemons, none of another's.
    MoerlError if it cannot be joined, or has not come up in time."""
    with _only_run():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        others = [child.pid for child in psutil.Process().children()]
        _start(start_seconds, others)
        with ExitStack() as files:
            files.callback(ray.shutdown)
            daemons = []
            for name, pid in _daemons(others):
                with suppress(ProcessLookupError):  # it has ended: whoever needs it says so
                    daemons.append(Daemon(name=name, pid=pid, end=os.pidfd_open(pid)))
                    files.callback(os.close, daemons[-1].end)
            yield daemons


@contextmanager
def _only_run() -> Iterator[None]:
    """Raises MoerlError where this process cannot have a Ray of its own."""
    global _had_ray
    if _had_ray not in (None, os.getpid()):  # Ray would wait for threads that only that process has, for ever
        raise MoerlError(
            f"this process is a fork of process {_had_ray}, in which a run has had Ray, and no fork of it can: "
            'start it anew, as multiprocessing.get_context("spawn") does'
        )
    if not _RUN.acquire(blocking=False):
        raise MoerlError("this process has another run, in another thread, and can have one at a time: wait for it, or start a process")
    try:
        if ray.is_initialized():
            raise MoerlError("this process is in a Ray cluster already, and a run joins one itself: call ray.shutdown() first")
        _had_ray = os.getpid()
        yield
    finally:
        _RUN.release()


def _make_token() -> None:
    """Ray writes a token of its own into ~/.ray. Where there is no home, or none that can be written, it gets one of this process's.
    Raises ConfigError for a file named for the token that has none."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if named := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        _require_token(Path(named))
        return
    try:
        directory = Path.home() / ".ray"
        directory.mkdir(parents=True, exist_ok=True)
        token = directory / "auth_token"
        if os.access(token, os.R_OK) if token.exists() else os.access(directory, os.W_OK):
            return
    except (OSError, RuntimeError):  # also a user whom nobody has listed
        pass
    opened, file = tempfile.mkstemp(prefix="moerl-ray-token-")  # 0600
    with open(opened, "w") as written:
        written.write(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = file  # for good: the first token that a process has stays its token
    atexit.register(Path(file).unlink, missing_ok=True)


def _require_token(file: Path) -> None:
    try:
        refusal = "" if file.read_bytes().strip() else "it is empty"
    except OSError as error:
        refusal = error.strerror or str(error)
    if refusal:
        reason = f"{refusal}; Ray reads its token from there, and starts with none"
        fix = "unset RAY_AUTH_TOKEN_PATH, and Ray has a token of its own in ~/.ray"
        raise ConfigError([problem("RAY_AUTH_TOKEN_PATH", str(file), "must be a file with a token", reason, fix)])


def _start(seconds: float, others: Collection[int]) -> None:
    address, deadline = os.environ.get("RAY_ADDRESS"), time.monotonic() + seconds
    if address:
        require_listener(address, min(seconds, CONNECT_SECONDS))
        late = cannot_join(address, f"it does not answer within deadlines.start_seconds = {seconds:g}")
    else:
        _require_folder(ray_folder())
        _make_token()
        late = _did_not_start(seconds, 1, TimeoutError("one of its processes hangs"))
    hung = f"moerl: {late}"  # without end Ray waits for a process of its own that hangs as it starts
    for number in range(1, _NUM_TRIES + 1):
        try:
            with own_ray(deadline), ended_after(deadline + _SPARE_SECONDS - time.monotonic(), hung):
                # Without an address Ray would also join a cluster that somebody else started on this machine.
                ray.init(address or "local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            return
        except Exception as error:
            ray.shutdown()
            kill_all(others)
            if address:
                raise cannot_join(address, f"{error}; {TOKENS}") from error
            if number == _NUM_TRIES or time.monotonic() > deadline:
                raise _did_not_start(seconds, number, error) from error
            logger.warning("Ray did not start, and is started again: %s", error)


def cannot_join(address: str, reason: str) -> MoerlError:
    """Error of whoever was to join it."""
    return MoerlError(f"RAY_ADDRESS = {address}: the Ray cluster there cannot be joined: {reason}")


def require_listener(address: str, seconds: float) -> None:
    """Raises MoerlError if nothing listens there. Ray itself would ask again and again, for minutes and without a word."""
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdecimal():
        return  # of another form, which Ray reads
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=max(deadline - time.monotonic(), 0.1)).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise cannot_join(address, f"nothing answers there: {error}; does the node with Ray's head run?") from error
            time.sleep(0.2)


def ray_folder() -> Path:
    """Folder of Ray's sockets and logs, as ray/_common/utils.py chooses it."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


def _require_folder(folder: Path) -> None:
    """Raises ConfigError for one in which no Ray can start."""
    name = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    longest = _SOCKET_PATH - len(f"/ray/session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store")
    reason, fix = "Ray's sockets and logs lie below it", f"another {name}, on a disk of this node"
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())  # Ray makes the rest
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError([problem(name, str(folder), "must be a directory that can be written", reason, fix)])
    if len(os.fsencode(folder)) > longest:
        rule, reason = f"must have at most {longest} characters", f"{reason}, and the path of a socket at most {_SOCKET_PATH}"
        raise ConfigError([problem(name, str(folder), rule, reason, f"RAY_TMPDIR=/tmp, or {fix}")])


def _did_not_start(seconds: float, number: int, error: Exception) -> MoerlError:
    logs = ray_folder() / "ray/session_latest/logs"
    said = MoerlError(
        f"deadlines.start_seconds = {seconds:g}: Ray did not start, tried {number} time{'s' if number > 1 else ''}: {error}\n"
        f"    why: its processes ended, or this machine is too busy for them; their logs are in {logs}\n"
        "    fix: the same command, when there is less to do; a larger deadlines.start_seconds if it was only slow"
    )
    said.exit_code = ExitCode.KILLED
    return said


def _daemons(others: Collection[int]) -> Iterator[tuple[str, int]]:
    children = [child for child in psutil.Process().children() if child.pid not in others]
    for child in children:
        if (name := Path(_first_word(child)).name) in _DAEMONS:
            yield name, child.pid
        with suppress(psutil.Error):  # it has ended
            for agent in child.children():
                if (title := _first_word(agent)) in _AGENTS:
                    yield _AGENTS[title], agent.pid


def _first_word(process: psutil.Process) -> str:
    """Empty for one that has ended."""
    try:
        return next(iter(process.cmdline()), "")
    except psutil.Error:
        return ""
