"""A rollout server as a child process: started, watched, ended.

The child reports readiness by one line on its stdout and logs to a file. Its stdin is a pipe that begins with the run's secret, which is
seen neither in its arguments nor in its environment; nothing follows. The pipe ends with this process, however that ends, and the child
with the pipe.
"""

import asyncio
import logging
import os
import re
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import psutil
from pydantic import ValidationError

from moerl.cluster.forks.fork_client import CannotForkError, ForkedChild, can_fork
from moerl.cluster.run_secret import RunSecret
from moerl.cluster.sockets import free_ports
from moerl.hangs.watched import ProcessId, WatchedProcess
from moerl.rollout.server import wire
from moerl.types.errors import EngineError, EngineUnavailable, Origin
from moerl.types.exit_codes import ExitCode

logger = logging.getLogger(__name__)

_NOTHING_MORE: Mapping[str, str] = MappingProxyType({})
_READ_LATE = frozenset({"CUDA_VISIBLE_DEVICES"})
"""Variables that a forked process heeds. Others may be read by the loader or when a library is imported, as LD_PRELOAD."""
LOG_LINES = 20
"""Lines of the server's log in an error."""
LOG_ERRORS = 3
"""Different errors of this start's log before them, oldest first: the last lines may be mere consequences."""
_ERROR = re.compile(r"^(?:.*\] )?((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$")
"""The last line of a traceback, after what a logger may put before it."""


class ServerProcess:
    """One child at a time: `start`, `close`, and so on; close is safe at any time."""

    def __init__(
        self, command: Sequence[str], *, secret: RunSecret, label: str, log_path: Path, start_seconds: float, close_seconds: float = 10.0,
        environment: Mapping[str, str] = _NOTHING_MORE, has_log: bool = False,
    ):  # fmt: skip
        """`label` names the server in errors. `close_seconds`: between SIGTERM and SIGKILL. `environment`: beside this process's own; with
        any that is read at a start the child is executed, never forked.
        `has_log`: of an earlier child of this run, whose owner is gone."""
        self.label = label
        self._command, self._environment, self._secret = list(command), environment, secret
        self._log_path, self._has_log = log_path, has_log
        self._start_seconds = start_seconds
        self._close_seconds = close_seconds
        self._process: asyncio.subprocess.Process | ForkedChild | None = None
        self._log_begin = 0
        self._ready = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def watched(self) -> tuple[WatchedProcess, ...]:
        pid = self.pid
        process = None if pid is None or not psutil.pid_exists(pid) else ProcessId.of(pid)
        return (WatchedProcess(name=f"server {self.label}", node=socket.gethostname(), process=process, log=self._log_path),)

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def start(self) -> int:
        """The port it serves on. EngineError if it dies first, reports an error, or is silent for start_seconds; it is gone then."""
        self._ready = False
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._spawn()
                return await self.port()
        except TimeoutError as error:
            raise EngineError(
                f"{self.label}: not ready after deadlines.start_seconds = {self._start_seconds:g}; loading may be slow. Raise it or "
                f"see the log\n{self._log_tail()}"
            ) from error
        finally:
            if not self._ready:
                await self.close()

    async def launch(self, arguments: Sequence[str]) -> None:
        """One process of a server of several nodes, with more `arguments`: returns when it is about to meet the others. The first one's
        `port` comes next; the deadline of both, and to close it, are the caller's. EngineError as from `start`."""
        self._ready = False
        await self._spawn(arguments)
        line = await self._read_line()
        if not line.arrived:
            raise EngineError(f"{self.label}: {line.error}")

    async def port(self) -> int:
        """Port of a process that was launched, and serves."""
        ready = await self._read_line()
        if ready.port is None:
            raise EngineError(ready.error)
        self._ready = True
        return ready.port

    async def free_ports(self, count: int) -> int:
        """The first of `count` ports in a row that nobody on this node listens on."""
        return free_ports(count)

    async def death(self) -> EngineUnavailable:
        """Waits for the child's exit and describes it. Cancel it if the child turns out to live."""
        assert self._process is not None
        code = await self._process.wait()
        how = f"with exit code {code}" if code >= 0 else f"by signal {-code} ({signal.strsignal(-code)})"
        ended = EngineUnavailable(f"{self.label}: the server ended {how}\n{self._log_tail()}")
        if code < 0:
            ended.exit_code = ExitCode.KILLED
        return ended.began_in(Origin(who=f"rollout server {self.label}", node=socket.gethostname(), doing="", log=str(self._log_path)))

    async def close(self) -> None:
        """SIGTERM, then SIGKILL; returns when the child is gone, or is not even by that: the kernel holds it, or who forked it is stopped
        and does not tell of its end."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(self._close_seconds):
                await self._process.wait()
        except TimeoutError:
            logger.warning("%s did not end within %g s of SIGTERM and is killed", self.label, self._close_seconds)
            self._process.kill()
            try:
                async with asyncio.timeout(self._close_seconds):
                    await self._process.wait()
            except TimeoutError:
                logger.warning("%s (process %d) is not known to have ended by SIGKILL, and is left", self.label, self._process.pid)

    async def _spawn(self, arguments: Sequence[str] = ()) -> None:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        # The log of a run begins with its first child; one that takes its place writes on.
        with self._log_path.open("ab" if self._has_log else "wb") as log:
            self._has_log = True
            self._log_begin = log.tell()
            try:
                environment = {**os.environ, **self._environment}
                words, key, forks = [*self._command, *arguments], f"{self._secret.key}\n".encode(), self._environment.keys() <= _READ_LATE
                self._process = await _start(words, environment, log.fileno(), key, forks=forks)
            except OSError as error:
                raise EngineError(f"{self.label}: cannot run {self._command[0]!r}: {error}; check rollout.python") from error

    async def _read_line(self) -> wire.ReadyLine:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise await self.death()
        try:
            return wire.READY.validate_json(line)
        except ValidationError as error:
            raise EngineError(f"{self.label}: wrote {line!r} instead of its port; is rollout.python of the same moerl?") from error

    def _log_tail(self) -> str:
        if not self._log_path.exists():
            return f"(no log at {self._log_path})"
        lines: deque[str] = deque(maxlen=LOG_LINES)
        errors: dict[str, None] = {}  # in order
        with self._log_path.open("rb") as log:
            log.seek(self._log_begin)
            for line in (line.decode(errors="replace") for line in log):
                lines.append(line)
                if len(errors) < LOG_ERRORS and (found := _ERROR.match(line)):
                    errors[found[1].rstrip()] = None
        first = "" if len(errors) < 2 else "the first errors in it:\n" + "".join(f"    {error}\n" for error in errors)
        return f"{first}last lines of {self._log_path}:\n" + "".join(f"    {line}" for line in lines)


async def _start(
    command: Sequence[str], environment: Mapping[str, str], log: int, stdin_begins: bytes, *, forks: bool
) -> asyncio.subprocess.Process | ForkedChild:
    """A process in a session of its own: Ctrl-C in the terminal goes to the driver, which ends its servers in order."""
    if forks and can_fork(command):
        try:
            return await ForkedChild.start(command, stderr=log, environment=environment, stdin_begins=stdin_begins)
        except CannotForkError as error:
            logger.info("the server is executed: %s", error)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True, env=environment)
    assert process.stdin is not None
    process.stdin.write(stdin_begins)
    return process
