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
import sys
from typing import Any

from moerl.rewards.verifier import Check
from moerl.rewards.worker import Setup

_BOOT = "import sys; sys.path[:] = sys.argv[1:-1]; from moerl.rewards.worker import main; main()"
_LONGEST_ANSWER = 2**20


class WorkerProcess:
    """Raises ConnectionError from every method that finds the process gone."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process

    @classmethod
    async def start(cls) -> "WorkerProcess":
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _BOOT, *sys.path, str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LONGEST_ANSWER,
            # Verifiers are not parallel inside; thread pools sized for the machine would use up the address space.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            # Ctrl-C is for the driver, and a kill reaches what a user's function started.
            start_new_session=True,
        )  # fmt: skip
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def set_up(self, setup: Setup) -> dict[str, Any]:
        """{} once every verifier is built, or {"term", "error"}."""
        await self._send(setup)
        return await self._receive()

    async def begin(self, check: Check) -> None:
        await self._send(check)

    async def next_answer(self) -> dict[str, Any]:
        """Of the next term: {"value", "extra"}, or {"kind", "error"}, after which no more come for this check."""
        return await self._receive()

    async def kill(self) -> None:
        """Returns when the process is gone; safe to call twice."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _send(self, message: Setup | Check) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(pickle.dumps(message))
        await self._process.stdin.drain()

    async def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            if line:
                return json.loads(line)
        except ValueError as error:  # longer than _LONGEST_ANSWER, or no JSON: a verifier wrote into the pipe
            raise ConnectionError(f"the worker's answer cannot be read: {error}") from error
        raise ConnectionError(f"the worker ended with exit status {await self._process.wait()}")
