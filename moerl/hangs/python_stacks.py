"""Python stacks of a process that does not answer: read from outside by py-spy, else written by the process itself at a signal.

py-spy reads the memory of a process that it does not stop: also of one that is stopped already, and of one that hangs in C code. Where the
system forbids it, the process is sent STACK_SIGNAL, at which faulthandler writes the stacks into a memory file of that process.
"""

import ctypes
import faulthandler
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR2
_MEMORY_FILE = "moerl-stacks"
_PY_SPY_SECONDS = 20.0
_PY_SPY_TRIES = 3
"""A process that runs may change its stack while py-spy reads it."""
_DUMP_SECONDS = 2.0
"""Seconds for a process to begin answering the signal, and to write on."""
_POLL_SECONDS = 0.02
_PR_SET_PTRACER, _ANY_PROCESS = 0x59616D61, -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    text: str
    source: str
    """Which of the two wrote `text`, and why not the better one; or why there is none."""


@functools.cache
def answer_stack_requests() -> None:
    """In each process of a run, once: other processes of the same user may read its stacks, in both ways."""
    # Without it Yama (kernel.yama.ptrace_scope = 1) lets only a parent read; an error says that there is no Yama.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)
    # Open for the life of the process, and gone with it.
    faulthandler.register(STACK_SIGNAL, file=os.memfd_create(_MEMORY_FILE), all_threads=True)


def stacks_of(pid: int, *, py_spy: str | None) -> Stacks:
    """`py_spy`: its executable, see `find_py_spy`. Never raises for what the process, or the system, does not allow."""
    if py_spy is None:
        return _by_signal(pid, "py-spy is not installed")
    reason = ""
    for _ in range(_PY_SPY_TRIES):
        try:
            command = [py_spy, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return _by_signal(pid, f"py-spy: {error}")
        if ended.returncode == 0:
            return Stacks(text=ended.stdout, source="py-spy")
        reason = "py-spy: " + " ".join(line.strip() for line in ended.stderr.splitlines()[:4])
    return _by_signal(pid, reason)


def find_py_spy() -> str | None:
    """Beside the interpreter, else on the path."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


def memory_file(pid: int, name: str) -> Path | None:
    """The memory file of another process, made there by os.memfd_create(name)."""
    try:
        return next((link for link in Path(f"/proc/{pid}/fd").iterdir() if _target(link).startswith(f"/memfd:{name} ")), None)
    except OSError:  # it ended, or is another user's
        return None


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


def _by_signal(pid: int, why: str) -> Stacks:
    file = memory_file(pid, _MEMORY_FILE)
    if file is None:
        return Stacks(text="", source=f"none: {why}; the process answers no signal with its stacks")
    try:
        begin = file.stat().st_size
        os.kill(pid, STACK_SIGNAL)
        # A process that is stopped gets the signal when it goes on.
        _poll(lambda: file.stat().st_size > begin)
        text = _when_written(file)[begin:].decode(errors="replace")
    except OSError as error:
        return Stacks(text="", source=f"none: {why}; the process ended: {error}")
    if not text:
        return Stacks(text="", source=f"none: {why}; no answer to signal {STACK_SIGNAL.name} within {_DUMP_SECONDS:g} s")
    return Stacks(text=text, source=f"faulthandler, at signal {STACK_SIGNAL.name} ({why})")


def _when_written(file: Path) -> bytes:
    """Its contents once they grow no more."""
    sizes = [-1]

    def stands_still() -> bool:
        sizes.append(file.stat().st_size)
        return sizes[-1] == sizes[-2]

    _poll(stands_still)
    return file.read_bytes()


def _poll(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + _DUMP_SECONDS
    while not is_true() and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
