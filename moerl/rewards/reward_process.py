"""One reward worker as its pool sees it: a process that answers checks one at a time and can be killed at any moment.

It is started afresh rather than forked. The kernel then ends it with the driver, even while a verifier is stuck in C code; a worker
of multiprocessing's fork server would outlive both, each keeping the other alive.
"""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from typing import Any

from moerl.rewards.reward_worker import Setup
from moerl.rewards.verifiers import Check

_BOOT = "import sys; sys.path[:] = sys.argv[1:-1]; from moerl.rewards.reward_worker import main; main()"
_LONGEST_ANSWER = 2**20


class WorkerProcess:
    """Talks over one socket, which is the worker's standard input and output."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls) -> "WorkerProcess":
        """The caller's thread must last as long as the worker: the kernel takes its end for the driver's."""
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - returns within milliseconds, and a thread of a pool may end too early
                [sys.executable, "-c", _BOOT, *sys.path, str(os.getpid())],
                stdin=theirs.fileno(), stdout=theirs.fileno(),
                # Verifiers are not parallel inside; thread pools sized for the machine would use up the address space.
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                # Ctrl-C is for the driver, and a kill reaches what a user's function started.
                start_new_session=True,
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, *await asyncio.open_connection(sock=ours, limit=_LONGEST_ANSWER))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def set_up(self, setup: Setup) -> dict[str, Any]:
        """{} once every verifier is built, or {"term", "error"}. Raises ConnectionError if the worker ends."""
        await self._send(setup)
        return await self.next_answer()

    async def begin(self, check: Check) -> None:
        """Raises ConnectionError if the worker has ended."""
        await self._send(check)

    async def next_answer(self) -> dict[str, Any]:
        """Answer of the next term: {"value", "extra"}, or {"kind", "error"}, after which no more come for this check.

        Raises ConnectionError if the worker ends.
        """
        try:
            line = await self._reader.readline()
            if line:
                return json.loads(line)
        except ValueError as error:  # longer than _LONGEST_ANSWER, or no JSON: a verifier wrote into the socket
            raise ConnectionError(f"the worker's answer cannot be read: {error}") from error
        raise ConnectionError("the worker ended")

    async def kill(self) -> int:
        """Returns its exit status when the process is gone; safe to call twice."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        return await asyncio.to_thread(self._process.wait)

    async def _send(self, message: Setup | Check) -> None:
        self._writer.write(pickle.dumps(message))
        await self._writer.drain()
