"""Examination of processes from outside, on their node: state, memory, stacks, progress; and of the node: GPUs, kills for memory."""

import re
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import psutil

from moerl.cluster.descendants import started_at
from moerl.hangs.progress import Line, read_progress
from moerl.hangs.python_stacks import Stacks, find_py_spy, stacks_of
from moerl.hangs.watched import ProcessId
from moerl.hardware.hardware_tools import Absent, run_tool

_GPU_SECONDS = 20.0
"""nvidia-smi itself hangs when the driver does."""
_GPU_FIELDS = "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,pstate,ecc.errors.uncorrected.volatile.total"
_STACKS_AT_A_TIME = 32
"""py-spy takes a fifth of a second for each process; where it hangs, its limit."""
_ENDED = Stacks(text="", source="none: the process has ended")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One process."""

    pid: int
    command: str
    state: str
    """psutil's word: running, sleeping, disk-sleep, stopped, tracing-stop, zombie; gone."""
    rss_bytes: int
    stacks: Stacks
    progress: dict[int, Line] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    node: str
    clock: float
    """When, by the monotonic clock of this node."""
    processes: tuple[tuple[Examined, ...], ...]
    """Entry for each that was asked for: itself, and every process below it."""
    gpus: str
    """nvidia-smi's table, or why there is none."""


def examine(processes: Sequence[ProcessId]) -> NodeReport:
    """On the node of the processes. Takes seconds, unless py-spy hangs too."""
    py_spy, clock = find_py_spy(), time.monotonic()
    # First of all processes: the answer to a signal changes the state of a process.
    families = [tuple(_family(process)) for process in processes]
    with ThreadPoolExecutor(_STACKS_AT_A_TIME) as pool:
        read = pool.map(partial(_with_stacks, py_spy=py_spy), chain.from_iterable(families))
        found = tuple(tuple(next(read) for _ in family) for family in families)
    return NodeReport(node=socket.gethostname(), clock=clock, processes=found, gpus=_gpus())


def kill(processes: Sequence[ProcessId]) -> None:
    """By SIGKILL, which also ends a stopped process. On the node of the processes."""
    for wanted in processes:
        if (process := _find(wanted)) is not None:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def memory_counter() -> Path | None:
    """The file that counts how often the kernel killed a process of this one's cgroup for memory; None where there is none."""
    files = (group / name for group in _memory_cgroups() for name in ("memory.events", "memory.oom_control"))
    return next((file for file in files if memory_kills(file) is not None), None)


def memory_kills(counter: Path) -> int | None:
    """So far, by a file of `memory_counter` on this node; None if it cannot be read (any more)."""
    try:
        found = re.search(r"^oom_kill (\d+)$", counter.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1])


def _memory_cgroups() -> Iterator[Path]:
    """Innermost first, for both versions of cgroups."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = _CGROUPS / controllers
                group = root / path.lstrip("/")
                yield from (group, *(parent for parent in group.parents if parent.is_relative_to(root)))


def _find(wanted: ProcessId) -> psutil.Process | None:
    try:
        process = psutil.Process(wanted.pid)
        return process if started_at(wanted.pid) == wanted.started else None
    except psutil.NoSuchProcess:
        return None


def _family(wanted: ProcessId) -> Iterator[Examined]:
    process = _find(wanted)
    if process is None:
        yield Examined(pid=wanted.pid, command="", state="gone", rss_bytes=0, stacks=_ENDED)
        return
    family = [process]
    with suppress(psutil.NoSuchProcess):
        family += process.children(recursive=True)
    for each in family:
        with suppress(psutil.NoSuchProcess):
            yield _examine(each)


def _with_stacks(found: Examined, *, py_spy: str | None) -> Examined:
    return found if found.state == "gone" else replace(found, stacks=stacks_of(found.pid, py_spy=py_spy))


def _examine(process: psutil.Process) -> Examined:
    return Examined(
        pid=process.pid,
        command=" ".join(process.cmdline()).strip(),
        state=process.status(),
        rss_bytes=process.memory_info().rss,
        stacks=_ENDED,
        progress=read_progress(process.pid),
    )


def _gpus() -> str:
    said = run_tool("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv", seconds=_GPU_SECONDS)
    return said.reason if isinstance(said, Absent) else said
