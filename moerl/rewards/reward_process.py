"""One reward worker as its pool sees it: a process that answers checks one at a time and can be killed at any moment.

It is started afresh rather than forked. The kernel then ends it with the driver, even while a verifier is stuck in C code; a worker
of multiprocessing's fork server would outlive both, each keeping the other alive.
"""

import asyncio
import contextlib
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

from moerl.rewards.answer_channel import AnswerChannel, checked_answer
from moerl.rewards.reward_worker import Setup
from moerl.rewards.verifiers import Check

_BOOT = "import sys; sys.path[:] = sys.argv[1:-1]; from moerl.rewards.reward_worker import main; main()"


class WorkerProcess:
    """Talks over two sockets, which are the worker's standard input and output."""

    def __init__(self, process: subprocess.Popen[bytes], channel: AnswerChannel):
        self._process, self._channel = process, channel

    @classmethod
    async def start(cls) -> "WorkerProcess":
        """The caller's thread must last as long as the worker: the kernel takes its end for the driver's."""
        (requests, theirs_in), (answers, theirs_out) = socket.socketpair(), socket.socketpair()
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - returns within milliseconds, and a thread of a pool may end too early
                [sys.executable, "-c", _BOOT, *sys.path, str(os.getpid())],
                stdin=theirs_in.fileno(), stdout=theirs_out.fileno(),
                # Verifiers are not parallel inside; thread pools sized for the machine would use up the address space.
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                # Ctrl-C is for the driver, and a kill reaches what a user's function started.
                start_new_session=True,
            )  # fmt: skip
        except OSError:
            requests.close()
            answers.close()
            raise
        finally:
            theirs_in.close()
            theirs_out.close()
        return cls(process, AnswerChannel(requests, answers))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def set_up(self, setup: Setup) -> dict[str, Any]:
        """{} once every verifier is built, or {"term", "error"}. Raises ConnectionError if the worker ends, ForgedAnswer."""
        number = await self._ask(setup)
        return await self._channel.receive(number)

    async def answers(self, check: Check, num_terms: int) -> AsyncIterator[dict[str, Any]]:
        """Answer of each term in order: {"value", "extra"}, or {"kind", "error"}, which is the last.

        Raises ConnectionError if the worker ends. Raises ForgedAnswer for anything else on its channel, before the last answer is given
        out: then, as after a check that is not read to its end, the worker must be killed.
        """
        number = await self._ask(check)
        for left in reversed(range(num_terms)):
            answer = checked_answer(await self._channel.receive(number))
            is_last = left == 0 or "error" in answer
            if is_last:
                self._channel.require_silence()
            yield answer
            if is_last:
                return

    async def kill(self) -> int:
        """Returns its exit status when the process is gone; safe to call twice."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._channel.close()
        return await asyncio.to_thread(self._process.wait)

    async def _ask(self, request: Setup | Check) -> str:
        """The number that answers to this request repeat. It cannot be guessed, so that no check prepares an answer for the next one."""
        number = secrets.token_hex(16)
        await self._channel.send(pickle.dumps((number, request)))
        return number
