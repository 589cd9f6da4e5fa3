"""End whatever this process started, by descent and never by name."""

import ctypes
import logging
import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
END_SECONDS = 30.0
"""At most for processes to be gone after SIGKILL."""
_KEPT_FROM_DAEMONS = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def no_descendant_outlives() -> Iterator[None]:
    """Context in which processes whose parent ends fall to this one instead of to the system's first, and at the end all are killed."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        kill_all()


def started_at(pid: int) -> float:
    """When it was started, in seconds since the machine was, which no step of the wall clock changes: with its pid it names one process.
    Raises psutil.NoSuchProcess."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
    return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def end_with_parent() -> None:
    """In a child, before it executes another program: it is killed if this process is."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_parent_alone() -> None:
    """Also keeps SIGTERM and SIGUSR1 from the child and its descendants.

    Slurm sends them to every process of a step. Whoever saves a checkpoint then needs Ray for a little longer.
    """
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_FROM_DAEMONS)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def kill_all(others: Collection[int] = ()) -> None:
    """Children of this process but for `others`, and whatever is below them. Until none is left: one that is being killed may just have
    started another."""
    deadline = time.monotonic() + END_SECONDS
    while children := list(_below(others)):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=1.0)
        if not others:
            _reap()
        if time.monotonic() > deadline:
            logger.error(
                "these processes do not end: %s", ", ".join(f"{child.pid} {child.name()}" for child in children if child.is_running())
            )
            return


def _below(others: Collection[int]) -> Iterator[psutil.Process]:
    for child in psutil.Process().children():
        if child.pid not in others:
            with suppress(psutil.NoSuchProcess):
                yield from (child, *child.children(recursive=True))


def _reap() -> None:
    """Zombies, among them those that fell to this process."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
