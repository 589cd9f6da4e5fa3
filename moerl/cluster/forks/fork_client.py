"""Asking for a fork, and what stands for the process then: the calls of subprocess.Popen, and of asyncio's processes."""

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from moerl.cluster.forks.fork_server import VARIABLE, for_workers, user_of

_REPLY_SECONDS = 120.0
"""Seconds for a server that is importing what it preloads."""


class CannotForkError(Exception):
    """There is no server, or it does not answer: execute the program."""


class ForkedProcess:
    """A process that the server of this environment forked. Needs no owner: it ends with the server at the latest."""

    def __init__(
        self, argv: Sequence[str], *, stdin: int, stdout: int, stderr: int, environment: Mapping[str, str] | None = None,
        session: bool = False, is_worker: bool = False, cwd: Path | None = None,
    ):  # fmt: skip
        """`argv`: that of an interpreter: PYTHON -m MODULE ..., or PYTHON FILE .... The files are this process's; the child has copies.
        `is_worker`: of Ray, which shows a title of its own; otherwise the system shows `argv`. CannotForkError: nothing was started."""
        self.args = list(argv)
        self.returncode: int | None = None
        request = {
            "argv": self.args,
            "env": dict(os.environ if environment is None else environment),
            "cwd": str(Path.cwd() if cwd is None else cwd),
            "session": session,
            "titled": not is_worker,
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "ignored": [int(n) for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN and n != signal.SIGPIPE],
        }
        name = os.environ.get(VARIABLE, "")
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.pid = self._ask(for_workers(name) if is_worker else name, json.dumps(request).encode(), [stdin, stdout, stderr])
        except (OSError, ValueError) as error:
            self._connection.close()
            raise CannotForkError(str(error)) from error

    def poll(self) -> int | None:
        self._read(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._read(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def fileno(self) -> int:
        """Readable when it has ended."""
        return self._connection.fileno()

    def _ask(self, name: str, text: bytes, files: Sequence[int]) -> int:
        self._connection.settimeout(_REPLY_SECONDS)
        if not name:
            raise OSError(f"{VARIABLE} is not set")
        self._connection.connect(b"\0" + name.encode())
        if user_of(self._connection) != os.getuid():
            raise OSError("somebody else's server")
        socket.send_fds(self._connection, [b"\0"], list(files))
        self._connection.sendall(text + b"\n")
        return int(self._line())

    def _line(self) -> bytes:
        """The end of the connection is that of the server, and of what it forked."""
        with self._connection.makefile("rb", buffering=0) as said:
            return said.readline()

    def _read(self, timeout: float | None) -> None:
        if self.returncode is not None or not select.select([self._connection], [], [], timeout)[0]:
            return
        line = self._line()
        self.returncode = int(line) if line.endswith(b"\n") else -signal.SIGKILL


class ForkedChild:
    """The same as asyncio's own subprocess.Process, with pipes for stdin and stdout."""

    def __init__(self, process: ForkedProcess, stdin: int, stdout: asyncio.StreamReader):
        self._process, self._stdin, self.stdout, self.pid = process, stdin, stdout, process.pid
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        loop.add_reader(process, self._note_end)

    @classmethod
    async def start(cls, argv: Sequence[str], *, stderr: int, environment: Mapping[str, str], stdin_begins: bytes = b"") -> "ForkedChild":
        """In a session of its own. `stdin_begins`: at most what a pipe holds. CannotForkError as ForkedProcess."""
        (stdin, own_stdin), (own_stdout, stdout) = os.pipe(), os.pipe()
        os.write(own_stdin, stdin_begins)
        try:
            process = ForkedProcess(argv, stdin=stdin, stdout=stdout, stderr=stderr, environment=environment, session=True)
        except CannotForkError:
            os.close(own_stdin)
            os.close(own_stdout)
            raise
        finally:
            os.close(stdin)
            os.close(stdout)
        reader = asyncio.StreamReader()
        file = os.fdopen(own_stdout, "rb", buffering=0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
        return cls(process, own_stdin, reader)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        """May be awaited by several at a time."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def _note_end(self) -> None:
        code = self._process.poll()
        if code is not None:
            asyncio.get_running_loop().remove_reader(self._process)
            os.close(self._stdin)
            if not self._ended.done():
                self._ended.set_result(code)


def can_fork(argv: Sequence[str]) -> bool:
    """Whether it is this interpreter with a module of the kind that the server has imported, and there is a server."""
    return bool(os.environ.get(VARIABLE)) and list(argv[:2]) == [sys.executable, "-m"]
