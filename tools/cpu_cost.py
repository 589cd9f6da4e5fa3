#!/usr/bin/env python3
"""CPU seconds, user and system, of a command and of everything that it starts: python tools/cpu_cost.py -- make test

Also of processes that leave their parents, as Ray's daemons do: the command runs in a cgroup of its own where one can be made,
which takes root; elsewhere this process is the one that orphans fall to (a subreaper). The line with both times goes to stderr,
the exit status is the command's (128 + N after signal N). The plugin of the tests, tests/suite/costs.py, counts with the same classes.
"""

import argparse
import contextlib
import ctypes
import os
import resource
import shlex
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_LOOK_SECONDS = 0.25


class Counter(Protocol):
    """What counts the CPU seconds of processes."""

    kind: str

    def join(self) -> None:
        """Counts the calling process and what it starts from now on."""

    def seconds(self) -> float: ...

    def pids(self) -> list[int]:
        """Counted processes that still run."""

    def close(self) -> None: ...


class Cgroup:
    """A new control group within that of this process. The kernel counts for it, also what has ended."""

    def __init__(self, kind: str, parent: Path, name: str) -> None:
        self.kind, self.parent, self.path = kind, parent, parent / name
        self.path.mkdir()
        try:
            self.seconds()
        except (OSError, StopIteration):
            self.path.rmdir()
            raise

    def join(self) -> None:
        _move(os.getpid(), self.path)

    def seconds(self) -> float:
        if self.kind == "cgroup1":
            return int((self.path / "cpuacct.usage").read_text()) / 1e9
        lines = (self.path / "cpu.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("usage_usec")) / 1e6

    def pids(self) -> list[int]:
        return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]

    def close(self) -> None:
        """Those who still run go back to the group above, which counts them on."""
        for _ in range(100):  # whoever forks meanwhile needs another round
            pids = self.pids()
            for pid in pids:
                with contextlib.suppress(OSError):  # it has ended
                    _move(pid, self.parent)
            if not pids:
                break
        try:
            self.path.rmdir()
        except OSError as error:  # groups of others within it: nothing depends on its end
            print(f"cpu_cost: {self.path} stays: {error}", file=sys.stderr)


@dataclass(frozen=True)
class _Process:
    """What /proc says of a process, zombies included, until it was waited for."""

    pid: int
    parent: int
    is_zombie: bool
    started: int
    """With the pid: who it is, as pids are used again."""
    seconds: float
    """CPU, with that of the children that it waited for."""


class Subreaper:
    """This process as the one that orphans among its descendants fall to.

    Its children's resource usage holds whoever was waited for; /proc has the others. What ends below a process that ignores SIGCHLD, as
    Ray's raylet does, is in neither: such processes are looked at four times a second, and what they spent since the last look is lost.
    """

    kind = "subreaper"

    def __init__(self, with_own: bool) -> None:
        self._with_own = with_own
        self._unwaited: dict[tuple[int, int], float] = {}
        self._lost = 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed: processes that leave their parents cannot be counted")
        threading.Thread(target=self._watch, name="cpu_cost", daemon=True).start()

    def join(self) -> None: ...

    def seconds(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        own = time.process_time() if self._with_own else 0.0
        alive = sum(process.seconds for process in self._look())
        return own + usage.ru_utime + usage.ru_stime + alive + self._lost

    def pids(self) -> list[int]:
        return [process.pid for process in self._look() if not process.is_zombie]

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            self._look()

    def _look(self) -> list[_Process]:
        with self._lock:
            below = _descendants()
            there = {(process.pid, process.started) for process in below}
            self._lost += sum(seconds for who, seconds in self._unwaited.items() if who not in there)
            ignoring = {pid for pid in {process.parent for process in below} if _ignores_children(pid)}
            self._unwaited = {(process.pid, process.started): process.seconds for process in below if process.parent in ignoring}
            return below


def new_counter(kind: str = "auto", with_own: bool = False) -> Counter:
    """`auto`: a cgroup, else a subreaper. with_own: whether a subreaper counts this process too."""
    if kind != "subreaper":
        for version, parent in _own_cgroups():
            if kind in ("auto", version):
                try:
                    return Cgroup(version, parent, f"cpu_cost-{os.getpid()}")
                except (OSError, StopIteration):
                    continue
        if kind != "auto":
            raise OSError(f"{kind}: no group can be made in {[str(parent) for _, parent in _own_cgroups()] or 'any hierarchy'}")
    return Subreaper(with_own)


def _own_cgroups() -> Iterator[tuple[str, Path]]:
    """The groups of this process that count CPU time, version 2 first. A mount shows the hierarchy from its root field on."""
    groups = {}
    for line in _lines(_PROC / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        groups["" if number == "0" else "cpuacct" if "cpuacct" in controllers.split(",") else controllers] = path
    mounts = [line.split() for line in _lines(_PROC / "self" / "mountinfo")]
    for version, filesystem, controller in (("cgroup2", "cgroup2", ""), ("cgroup1", "cgroup", "cpuacct")):
        for fields in mounts:
            after = fields[fields.index("-") + 1 :]
            if after[0] == filesystem and controller in groups and (not controller or controller in after[2].split(",")):
                inside = os.path.relpath(groups[controller], fields[3])
                yield version, Path(fields[4]) / ("." if inside.startswith("..") else inside)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _move(pid: int, group: Path) -> None:
    (group / "cgroup.procs").write_text(str(pid))


def _descendants() -> list[_Process]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # without children no look at /proc is needed
        return []
    children: dict[int, list[_Process]] = {}
    for name in filter(str.isdigit, os.listdir(_PROC)):
        if process := _process(name):
            children.setdefault(process.parent, []).append(process)
    below, waiting = [], [os.getpid()]
    while waiting:
        of_one = children.get(waiting.pop(), [])
        below += of_one
        waiting += [process.pid for process in of_one]
    return below


def _process(pid: str) -> _Process | None:
    try:
        fields = (_PROC / pid / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    seconds = sum(int(ticks) for ticks in fields[11:15]) / _TICKS
    return _Process(int(pid), int(fields[1]), fields[0] == "Z", int(fields[19]), seconds)


def _ignores_children(pid: int) -> bool:
    """Whether the kernel reaps them for it, without adding their times to its own."""
    masks = [line.split()[1] for line in _lines(_PROC / str(pid) / "status") if line.startswith("SigIgn:")]
    return any(int(mask, 16) >> (signal.SIGCHLD - 1) & 1 for mask in masks)


def _start(command: list[str], counter: Counter) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        counter.join()
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cpu_cost: {command[0]}: {error.strerror}", file=sys.stderr)
    os._exit(127)


def _wait(pid: int) -> int:
    """Status of the command as a shell gives it. Orphans that end meanwhile are waited for, which adds them to the resource usage."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command as well
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage="cpu_cost.py [--counter KIND] -- COMMAND ...")
    parser.add_argument("--counter", choices=["auto", "cgroup2", "cgroup1", "subreaper"], default="auto")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    start = time.monotonic()
    counter = new_counter(arguments.counter)
    status = _wait(_start(arguments.command, counter))
    seconds, alive, wall = counter.seconds(), len(counter.pids()), time.monotonic() - start
    counter.close()
    left = f", {alive} processes still run" if alive else ""
    name = textwrap.shorten(shlex.join(arguments.command), 120)
    print(f"cpu_cost: {seconds:.2f} CPU seconds, {wall:.2f} s of wall time{left} ({counter.kind}): {name}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
