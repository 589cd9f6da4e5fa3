"""A command that trains, watched from outside: the time of its steps, CPU seconds by process, the memory of all its processes.

The command prints a line `STEP/STEPS REWARD ...` for every step. CPU seconds are those of tools/cpu_cost.py; memory is the proportional
set size (PSS), in which a page that several processes share counts once.
"""

import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from cpu_cost import Counter, new_counter

ROLES = (
    ("raylet/raylet", "Ray's raylet"), ("ray::TrainWorker", "train rank"), ("ray::CollectorActor", "collector"),
    ("ray::IDLE", "worker of Ray without a task"), ("ray::DashboardAgent", "Ray's dashboard agent"),
    ("ray::RuntimeEnvAgent", "Ray's agent for environments"), ("dashboard/agent.py", "Ray's dashboard agent"),
    ("runtime_env/agent", "Ray's agent for environments"), ("gcs_server", "Ray's gcs_server"),
    ("ray/dashboard", "Ray's dashboard"), ("ray/util/client", "Ray's client server"),
    ("moerl.rollout.engines", "rollout server"), ("moerl.rollout.server", "rollout server"),
    ("reward_supervisor", "reward supervisor, worker"),
    ("ray_worker", "train rank"), ("moerl.cluster.forks", "fork servers"), ("moerl train", "driver, and the process before it"),
    ("trl_demo", "trl"),
)  # fmt: skip
"""Part of a command line, and who has it; the first that is found counts."""
_ROW = re.compile(r"\s*(\d+)/\d+\s+(\S+)")
_LOOK_SECONDS = 0.2
Roles = dict[str, tuple[int, float]]
"""By role: how many processes, and their CPU seconds together."""


@dataclass
class Watched:
    warmup: int
    times: list[float]
    """Seconds on a clock: the start of the command, then the end of each step."""
    rewards: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of all processes from the start to the end of each step."""
    roles: list[Roles] = field(default_factory=list)
    """At the end of the warm-up, and of the last step."""

    @property
    def first_seconds(self) -> float:
        """Seconds from the start of the command to the end of its first step."""
        return self.times[1] - self.times[0]

    @property
    def first_cpu(self) -> float:
        return self.cpu[0]

    @property
    def step_seconds(self) -> float:
        """Median of the steps after the warm-up."""
        return statistics.median(end - start for start, end in pairwise(self.times[self.warmup :]))

    @property
    def step_cpu(self) -> float:
        """CPU seconds of a step after the warm-up, the mean."""
        return (self.cpu[-1] - self.cpu[self.warmup - 1]) / (len(self.cpu) - self.warmup)

    def step_roles(self) -> Roles:
        """CPU seconds of a step after the warm-up, by role; `ended`: of processes that were not there at its end."""
        before, after = self.roles
        steps = len(self.cpu) - self.warmup
        found = {role: (count, (seconds - before.get(role, (0, 0.0))[1]) / steps) for role, (count, seconds) in after.items()}
        return found | {"ended": (0, self.step_cpu - sum(seconds for _, seconds in found.values()))}


def role_of(command_line: str) -> str:
    return next((name for part, name in ROLES if part in command_line), f"other: {command_line[:60]}")


def watched(command: Sequence[str], environment: Mapping[str, str], *, warmup: int, steps: int) -> Watched:
    """Times and CPU seconds of `command`. Raises SystemExit with its last words if it fails."""
    with contextlib.closing(new_counter()) as counter, _started(command, environment, counter) as lines:
        found, before = Watched(warmup=warmup, times=[time.monotonic()]), counter.seconds()
        for line in lines:
            if row := _ROW.match(line):
                found.times.append(time.monotonic())
                found.cpu.append(counter.seconds() - before)
                found.rewards.append(float(row[2]))
                if int(row[1]) in (warmup, steps):
                    found.roles.append(_roles(counter))
        return found


def peak_pss(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Most bytes that all processes of `command` have together. Looking takes the processes' time: this is a run of its own."""
    peak, ended = 0, threading.Event()
    with contextlib.closing(new_counter()) as counter:

        def look() -> None:
            nonlocal peak
            while not ended.wait(_LOOK_SECONDS):
                peak = max(peak, sum(map(_pss, counter.pids())))

        watcher = threading.Thread(target=look)
        with _started(command, environment, counter) as lines:
            watcher.start()
            try:
                for _ in lines:
                    pass
            finally:
                ended.set()
                watcher.join()
    return peak


@contextlib.contextmanager
def _started(command: Sequence[str], environment: Mapping[str, str], counter: Counter) -> Iterator[Iterator[str]]:
    """Lines of what `command` prints."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=counter.join
        )  # fmt: skip
        assert process.stdout is not None
        last: list[str] = []
        with process:
            yield (line for line in process.stdout if last.append(line) is None)
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(last[-20:])}{errors.read()[-4000:]}")


def _roles(counter: Counter) -> Roles:
    found: Roles = {}
    for pid in counter.pids():
        with contextlib.suppress(psutil.Error):  # it has ended
            process = psutil.Process(pid)
            times, name = process.cpu_times(), role_of(" ".join(process.cmdline()))
            count, seconds = found.get(name, (0, 0.0))
            found[name] = count + 1, seconds + times.user + times.system
    return found


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
