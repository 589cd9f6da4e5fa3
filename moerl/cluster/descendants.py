"""End whatever this process started, by descent and never by name."""

import ctypes
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
        _kill_all()


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


def _kill_all() -> None:
    """Until none is left: one that is being killed may just have started another."""
    deadline = time.monotonic() + END_SECONDS
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=1.0)
        _reap()
        if time.monotonic() > deadline:
            logger.error(
                "these processes do not end: %s", ", ".join(f"{child.pid} {child.name()}" for child in children if child.is_running())
            )
            return


def _reap() -> None:
    """Zombies, among them those that fell to this process."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
