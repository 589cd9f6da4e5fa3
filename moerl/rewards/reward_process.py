"""One reward worker as its slot sees it: a process that answers checks in order and can be killed at any moment.

It is started afresh rather than forked from the driver. The process that is started is its supervisor (reward_supervisor.py), which ends it
and all that checks left running, also when the driver is killed and a verifier is stuck in C code.
"""

import asyncio
import contextlib
import os
import pickle
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from moerl.config.schema.data_config import Isolation, RewardTerm
from moerl.rewards.answer_channel import AnswerChannel, checked_answer
from moerl.rewards.reward_worker import Setup, framed

_BOOT = "import sys; sys.path[:] = sys.argv[1:-3]; from moerl.rewards.reward_supervisor import main; main()"
_END_SECONDS = 10.0
"""Time for a supervisor to end what checks started; then it is killed itself."""
_KEPT = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "LANGUAGE",
    "TZ",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONUTF8",
    "PYTHONHASHSEED",
    "PYTHONDONTWRITEBYTECODE",
)
_KEPT_WITH_NETWORK = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")


class WorkerProcess:
    """Talks over two sockets, which are the worker's standard input and output."""

    def __init__(self, process: subprocess.Popen[bytes], channel: AnswerChannel, isolation: Isolation, own: str):
        self._process, self._channel, self._isolation, self._own = process, channel, isolation, own

    @classmethod
    async def start(cls, isolation: Isolation) -> "WorkerProcess":
        """The caller's thread must last as long as the worker: the kernel takes its end for the driver's."""
        (requests, theirs_in), (answers, theirs_out) = socket.socketpair(), socket.socketpair()
        own = tempfile.mkdtemp(prefix="moerl-reward-")
        with theirs_in, theirs_out:
            try:
                process = subprocess.Popen(  # noqa: ASYNC220 - returns within milliseconds, and a thread of a pool may end too early
                    [sys.executable, "-c", _BOOT, *sys.path, isolation, own, str(os.getpid())],
                    stdin=theirs_in.fileno(), stdout=theirs_out.fileno(), env=_environment(isolation, own),
                    start_new_session=True,  # Ctrl-C is for the driver
                )  # fmt: skip
            except OSError:
                requests.close()
                answers.close()
                shutil.rmtree(own)
                raise
        return cls(process, AnswerChannel(requests, answers), isolation, own)

    @property
    def pid(self) -> int:
        """Process id of the supervisor, whose child the worker is."""
        return self._process.pid

    async def set_up(self, terms: dict[str, RewardTerm], memory_bytes: int) -> dict[str, Any]:
        """{} once every verifier is built and isolated, or {"term", "error"}. Raises ConnectionError if the worker ends, ForgedAnswer."""
        setup = Setup(terms=terms, isolation=self._isolation, own=self._own, memory_bytes=memory_bytes)
        [number] = await self.ask([pickle.dumps(setup)])
        return await self._channel.receive(number)

    async def ask(self, requests: Sequence[bytes]) -> list[str]:
        """Number of each of these pickled requests, which go out in one message. Answers repeat it, and nobody can guess it: no check
        prepares an answer for another. Raises as `answer`."""
        numbers = [secrets.token_hex(16) for _ in requests]
        await self._channel.send(b"".join(map(framed, numbers, requests)))
        return numbers

    async def answer(self, number: str) -> dict[str, Any]:
        """Answer of the next term of the check with this number: {"value", "extra"}, or {"kind", "error"}, which is its last.

        Raises ConnectionError if the worker ends, ForgedAnswer for anything else on its channel. After either, as after a check whose
        answers are not read, the worker must be killed.
        """
        return checked_answer(await self._channel.receive(number))

    def require_silence(self) -> None:
        """To be called after the last answer, before it is believed. Raises as `answer`."""
        self._channel.require_silence()

    async def kill(self) -> int:
        """Returns its exit status when it and all that its checks started are gone; safe to call twice."""
        self._channel.close()
        self._process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self._wait)

    def _wait(self) -> int:
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()
        finally:  # the supervisor has removed it, unless it was killed itself
            shutil.rmtree(self._own, ignore_errors=True)


def _environment(isolation: Isolation, own: str) -> Mapping[str, str]:
    """The driver's has credentials, of which an isolated worker gets none. Verifiers are not parallel inside.

    Thread pools sized for the machine would use up the address space.
    """
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if isolation == "off":
        return {**os.environ, **threads}
    kept = (*_KEPT, *(_KEPT_WITH_NETWORK if isolation == "network" else ()))
    found = {name: value for name, value in os.environ.items() if name.upper() in kept or name.startswith("LC_")}
    return {**found, **threads, "HOME": own, "TMPDIR": own, "CUDA_VISIBLE_DEVICES": ""}
