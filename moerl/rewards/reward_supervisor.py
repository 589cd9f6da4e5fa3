"""The process above one worker: whatever a check starts ends with the worker, and is bounded in number while that lives.

    pool -- SIGTERM, or its death --> supervisor --forks--> worker --> what checks start, wherever it hides

Orphans fall to it (PR_SET_CHILD_SUBREAPER), sessions of their own or not. It imports the standard library alone, forks the worker before
that imports anything, and ends as the worker ended.
"""

import ctypes
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from moerl.rewards import landlock

MAX_TASKS = 256
"""Processes and threads of a worker that is isolated, itself included. With more the worker ends, and they with it."""
TOO_MANY_TASKS = 99
"""Exit status of that."""
_COUNT_SECONDS = 0.025
_SUDDEN_TASKS = 32
"""Processes and threads more on the machine than at the last look, at which the worker's are stopped and counted."""
_MOST_STDERR_BYTES = 1 << 20
"""Bytes that an isolated worker, and what its checks start, may print in its life."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _Stderr:
    """Standard error of an isolated worker: a pipe, since the driver's may be a file, to be read, emptied, and filled without a limit."""

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe()
        self._left = _MOST_STDERR_BYTES

    def become_stderr(self) -> None:
        """To be called in the worker."""
        os.dup2(self._writing, 2)
        os.close(self._writing)
        os.close(self.reading)

    def leave_to_worker(self) -> None:
        os.close(self._writing)
        os.set_blocking(self.reading, False)

    def pass_on(self) -> bool:
        """Whether there may be more to read, now or later. Reads a bounded part, so that no flood holds this process up."""
        try:
            text = os.read(self.reading, 1 << 16)
        except BlockingIOError:
            return True
        kept, is_last = text[: self._left], 0 < self._left <= len(text)
        self._left -= len(kept)
        with suppress(OSError):  # nobody listens, or no room is left: a worker outlives both
            os.write(2, kept + (b"\n[a reward worker prints too much: nothing more of it is shown]\n" if is_last else b""))
        return len(text) > 0

    def pass_on_rest(self) -> None:
        for _ in range(16):  # a pipe holds 1 MiB at most
            self.pass_on()


def main() -> None:
    """Arguments: search path of modules, level of isolation, the worker's own directory, and the process id of the pool."""
    isolation, directory, pool = sys.argv[-3], sys.argv[-2], int(sys.argv[-1])
    _end_with(pool, signal.SIGTERM)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    is_enclosed = isolation != "off" and _keep_signals_in(pool)
    supervisor = os.getpid()
    stderr = None if isolation == "off" else _Stderr()
    worker = os.fork()
    if worker == 0:
        _end_with(supervisor, signal.SIGKILL)
        if stderr is not None:
            stderr.become_stderr()
        from moerl.rewards.reward_worker import main as work

        work()
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # the worker's alone: the pool hears of its end at once
        os.dup2(nothing, descriptor)
    if stderr is not None:
        stderr.leave_to_worker()
    try:
        status = _watch(worker, stderr, is_enclosed=is_enclosed)
    finally:
        _end_all(is_enclosed)
        if stderr is not None:
            stderr.pass_on_rest()
        os.spawnvp(os.P_WAIT, "rm", ["rm", "-rf", "--", directory])
    _end_as(status)


def _end_with(parent: int, number: int) -> None:
    """The kernel sends the signal when the parent's thread that started this process ends: a check busy in C code heeds nothing else."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the reward pool ended before its worker began")


def _keep_signals_in(pool: int) -> bool:
    """Whether no signal of this process or of what it starts reaches any other from now on. Seen by trying, on the pool."""
    os.kill(pool, 0)
    if not landlock.keep_signals_in():
        return False
    try:
        os.kill(pool, 0)
    except PermissionError:
        return True
    return False


def _watch(worker: int, stderr: _Stderr | None, *, is_enclosed: bool) -> int:
    """Until the worker ends, SIGTERM asks for its end, or there are too many tasks; its status, as of os.wait."""
    reading, writing = os.pipe()
    for descriptor in (reading, writing):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    with suppress(OSError):  # where it may: to have its turn among many
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    before, heard = _machine_tasks(), [reading] if stderr is None else [reading, stderr.reading]
    while True:
        for pid, status in _ended():
            if pid == worker:
                return status
        ready = select.select(heard, [], [], None if stderr is None else _COUNT_SECONDS)[0]
        if reading in ready and signal.SIGTERM in os.read(reading, 4096):
            os.kill(worker, signal.SIGKILL)
        if stderr is not None:
            if stderr.reading in ready and not stderr.pass_on():
                heard.remove(stderr.reading)
            now = _machine_tasks()
            if _are_too_many(stopped=is_enclosed and now - before >= _SUDDEN_TASKS):
                return TOO_MANY_TASKS << 8
            before = now


def _are_too_many(*, stopped: bool) -> bool:
    """`stopped`: they are stopped while they are counted, all by one call, so that they do not outrun it."""
    with suppress(ProcessLookupError):  # the worker has ended meanwhile
        if stopped:
            os.kill(-1, signal.SIGSTOP)
    found = sum(threads for _, threads in islice(_descendants(), MAX_TASKS + 1)) > MAX_TASKS
    with suppress(ProcessLookupError):
        if stopped and not found:
            os.kill(-1, signal.SIGCONT)
    return found


def _machine_tasks() -> int:
    with open("/proc/loadavg") as loads:
        return int(loads.read().split()[3].partition("/")[2])


def _ended() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _end_all(is_enclosed: bool) -> None:
    """Until none is left: each that is killed leaves its children to this process.

    Enclosed, one call reaches all of them and nobody else, and none is forked meanwhile. Else those that are found are killed, many times.
    """
    if is_enclosed:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    while True:
        for pid, _ in () if is_enclosed else _descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _descendants() -> Iterator[tuple[int, int]]:
    """Process id and number of threads of each."""
    left = _children(os.getpid())
    while left:
        pid = left.pop()
        with suppress(OSError):  # it has ended meanwhile
            yield pid, len(os.listdir(f"/proc/{pid}/task"))
            left += _children(pid)


def _children(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as children:
                found += [int(child) for child in children.read().split()]
    return found


def _end_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        with suppress(OSError):  # of SIGKILL nothing can be set
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))
