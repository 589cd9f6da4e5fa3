"""The process that the user started, where the driver is a child of it: it hands signals on, and answers for the end of a driver that
cannot.

Ray ends the driver's process by itself, with exit code 1 and no word, when it finds that its raylet is gone. So the driver tells through a
pipe how it is about to end. If it ended without that word, it was killed, or Ray ended it: exit code 76, with the last cause it knew.
"""

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from moerl.cluster.descendants import end_with_parent, no_descendant_outlives
from moerl.types.exit_codes import ExitCode

_HANDED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT, signal.SIGCONT}
_WAITED_FOR = _HANDED_ON | {signal.SIGCHLD, signal.SIGTSTP}

_MOST_SAID = 4096
"""Characters of a cause. A few of them fit into a pipe."""

_told: int | None = None
"""The driver's end of the pipe; None in a process that nobody stands in front of, as a notebook's."""


def fork_driver() -> None:
    """Returns in the driver, a fork of this process, which itself ends when the driver does, and as it did. The driver has a process group
    of its own: what a terminal sends to the user's process reaches it once. It is killed if that process is.

    Where this process has threads it returns without a fork, which would copy their locks and not them: a program has called the command.
    """
    global _told
    if threading.active_count() > 1:
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as some shells hand it on, it would not tell of the driver's end
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    parent, driver = os.getpid(), os.fork()
    if driver:
        os.close(writing)
        _answer(driver, reading)
    end_with_parent()
    if os.getppid() != parent:
        os._exit(ExitCode.FAILED)
    os.setpgid(0, 0)
    for number in (signal.SIGTTIN, signal.SIGTTOU):  # a terminal stops other groups than its own: who reads it gets an error instead
        signal.signal(number, signal.SIG_IGN)
    os.close(reading)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _told = writing


def tell_end(code: object) -> None:
    """From the driver: from here on it ends by itself, as `sys.exit(code)` does."""
    _tell({"code": code if isinstance(code, int) else ExitCode.DONE if code is None else ExitCode.FAILED})


def tell_cause(message: str, code: int = ExitCode.KILLED) -> None:
    """From the driver: what the user is to read should it be ended from here on, and the exit code then. Cut: nobody reads the pipe while
    the driver lives."""
    _tell({"cause": message[:_MOST_SAID], "code_then": code})


@contextmanager
def reading_settings() -> Iterator[None]:
    """From the driver: inside, code of the user runs that the settings name, and may end the process without a word."""
    tell_cause("moerl: the process ended while it read the settings: code that they name ended it, or a library of that", ExitCode.FAILED)
    yield
    tell_cause("")


@contextmanager
def ended_after(seconds: float, message: str) -> Iterator[None]:
    """From the driver: the kernel ends it if what is inside takes longer, with `message` for the user: what hangs in C code may hold
    Python's lock, and then no thread of this process could. Nothing where nobody stands in front of it."""
    if _told is None:
        yield
        return
    tell_cause(message)
    signal.alarm(math.ceil(max(seconds, 1.0)))
    try:
        yield
    finally:
        signal.alarm(0)
        tell_cause("")


def _tell(words: dict[str, object]) -> None:
    if _told is not None:
        os.write(_told, json.dumps(words).encode() + b"\n")


def _answer(driver: int, reading: int) -> NoReturn:
    with no_descendant_outlives():  # what a driver that was killed had not ended yet
        status, handed_on = _wait(driver)
    words = list(_words(reading))
    code = next((each["code"] for each in words if "code" in each), None)
    if code is not None:
        os._exit(code & 0xFF)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if ended_by in handed_on:
        signal.signal(ended_by, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {ended_by})
        os.kill(os.getpid(), ended_by)
    last: dict[str, Any] = next((each for each in reversed(words) if "cause" in each), {"cause": "", "code_then": ExitCode.KILLED})
    os.write(2, f"{last['cause'] or _unknown(driver, ended_by)}\n".encode(errors="replace"))
    os._exit(last["code_then"])


def _words(reading: int) -> Iterator[dict[str, Any]]:
    """Words that it told; not a line in whose middle it was killed. Up to now: whatever it started and left may still hold the pipe."""
    with open(reading, "rb", buffering=0) as pipe:
        for line in (pipe.readall() or b"").splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def _wait(driver: int) -> tuple[int, set[int]]:
    """Its status, and the signals that it was handed."""
    handed_on: set[int] = set()
    while True:
        number = signal.sigwait(_WAITED_FOR)
        if number == signal.SIGCHLD:
            status = _status_of(driver)
            if status is not None:
                return status, handed_on
        elif number == signal.SIGTSTP:
            os.kill(driver, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            handed_on.add(int(number))
            os.kill(driver, number)


def _status_of(driver: int) -> int | None:
    """None while it runs. Whatever fell to this process and has ended is forgotten."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended in (0, driver):
            return status if ended else None


def _unknown(driver: int, ended_by: int | None) -> str:
    if ended_by is None:
        return f"moerl: Ray ended the driver (process {driver}), as it does when one of its own processes is gone; the same command goes on"
    name = signal.strsignal(ended_by)
    return (
        f"moerl: the driver (process {driver}) was ended by signal {ended_by} ({name}); the same command goes on from the newest checkpoint"
    )
