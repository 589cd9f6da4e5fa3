"""A run on one host until its first rollout is there: seconds, and by process CPU seconds, memory, torch and the files opened.

    python benchmarks/footprint.py --rounds 3
    python benchmarks/footprint.py --files            # with strace, which takes time: a run of its own, until the first step
    python benchmarks/footprint.py --tree OTHER       # takes turns with another checkout

Memory is the proportional set size (PSS), in which a page of several processes counts once in their sum. A process has loaded torch if its
library is mapped; one that was forked has what its parent had mapped, and pays for the pages it writes.
"""

import argparse
import collections
import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from cpu_cost import Counter, new_counter
from watched_run import role_of

HERE = Path(__file__).parents[1]

FIRST_ROLLOUT = "phase switch begins"
"""In run.log, when the first step's samples are there."""
FIRST_STEP = "step 1 took"


@dataclass
class Role:
    count: int = 0
    cpu: float = 0.0
    pss: int = 0
    torch: int = 0
    files: int = 0


@dataclass
class Found:
    seconds: float
    cpu: float
    load: float
    roles: dict[str, Role] = field(default_factory=lambda: collections.defaultdict(Role))

    @property
    def pss(self) -> int:
        return sum(role.pss for role in self.roles.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--tree", type=Path, action="append", default=[])
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    trees = [*options.tree, HERE]
    if options.files:
        for tree in trees:
            print(files_table(tree, opened_files(tree, options.overrides)))
        return
    found: dict[Path, list[Found]] = {tree: [] for tree in trees}
    for _ in range(options.rounds):
        for tree in trees:
            found[tree].append(measure(tree, options.overrides))
    for tree, runs in found.items():
        print(table(tree, runs))


def measure(tree: Path, overrides: list[str]) -> Found:
    """At the end of the first rollout. The run is ended then."""
    with contextlib.closing(new_counter()) as counter, _run(tree, overrides, counter) as (began, wait_for):
        wait_for(FIRST_ROLLOUT)
        found = Found(seconds=time.monotonic() - began, cpu=counter.seconds(), load=os.getloadavg()[0])
        for pid in counter.pids():
            with contextlib.suppress(OSError):  # it has ended
                _add(found.roles[role_of(_command_line(pid))], pid)
        return found


def opened_files(tree: Path, overrides: list[str]) -> dict[str, Role]:
    """Calls that opened a file until the end of the first step, by role."""
    if shutil.which("strace") is None:
        raise SystemExit("--files needs strace")
    roles: dict[str, Role] = collections.defaultdict(Role)
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "opens"
        strace = ["strace", "-f", "-qq", "--seccomp-bpf", "-e", "trace=open,openat", "-e", "signal=none", "-o", str(log)]
        with contextlib.closing(new_counter()) as counter, _run(tree, overrides, counter, strace) as (_, wait_for):
            names = wait_for(FIRST_STEP)
            lines = log.read_text(errors="replace").splitlines()
    for line in lines:
        thread = int(line.split(maxsplit=1)[0])
        if re.search(r"= -1 ", line) or re.search(r'"/(proc|sys|dev)/', line) or "open" not in line:
            continue
        roles[names.get(thread, "ended before it was looked at")].files += 1
    return roles


@contextlib.contextmanager
def _run(
    tree: Path, overrides: list[str], counter: Counter, before: list[str] | None = None
) -> Iterator[tuple[float, Callable[[str], dict[int, str]]]]:
    """When it began, and a function that waits for a line of its log and gives the role of each thread seen meanwhile."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(before or []), sys.executable, "-m", "moerl", "train", "recipe=grpo-tiny-moe-1n2g-sync", "placement.device=cpu",
            "num_steps=2",
            f"output_dir={directory}", "name=run", *overrides,
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": str(tree)}
        errors, log = Path(directory) / "errors", Path(directory) / "run" / "run.log"
        with errors.open("w") as file:
            began = time.monotonic()
            process = subprocess.Popen(command, env=environment, cwd=tree, stdout=file, stderr=file, preexec_fn=counter.join)

        def wait_for(text: str) -> dict[int, str]:
            names: dict[int, str] = {}
            while not log.exists() or text not in log.read_text():
                if process.poll() is not None:
                    raise SystemExit(f"the run ended with {process.returncode}:\n{errors.read_text()}")
                time.sleep(0.02)
                if before:
                    names |= _threads(counter)
            return names

        try:
            yield began, wait_for
        finally:
            process.terminate()
            process.wait()


def _threads(counter: Counter) -> dict[int, str]:
    found = {}
    for pid in counter.pids():
        with contextlib.suppress(OSError):
            role = role_of(_command_line(pid))
            found |= {int(thread): role for thread in os.listdir(f"/proc/{pid}/task")}
    return found


def _add(role: Role, pid: int) -> None:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    pss = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    role.count += 1
    role.pss += int(pss[1]) * 1024 if pss else 0
    role.cpu += (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
    role.torch += "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def table(tree: Path, runs: list[Found]) -> str:
    def middle(value: Callable[[Found], float]) -> float:
        return statistics.median(map(value, runs))

    names = sorted(set().union(*(run.roles for run in runs)), key=lambda name: -middle(lambda run: run.roles[name].pss))
    lines = [
        f"{tree}: first rollout after {middle(lambda run: run.seconds):.1f} s ({', '.join(f'{run.seconds:.1f}' for run in runs)}), "
        f"{middle(lambda run: run.cpu):.1f} CPU s ({', '.join(f'{run.cpu:.1f}' for run in runs)}), "
        f"{middle(lambda run: run.pss) / 1e6:.0f} MB; load {', '.join(f'{run.load:.1f}' for run in runs)}",
        "| process | how many | CPU s | MB (PSS) | with torch |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in names:
        roles = [run.roles[name] for run in runs]
        count, cpu, pss, torch = (
            statistics.median(column) for column in zip(*((r.count, r.cpu, r.pss, r.torch) for r in roles), strict=True)
        )
        lines.append(f"| {name} | {count:.0f} | {cpu:.2f} | {pss / 1e6:.0f} | {torch:.0f} |")
    return "\n".join(lines)


def files_table(tree: Path, roles: dict[str, Role]) -> str:
    lines = [f"{tree}: {sum(role.files for role in roles.values())} files opened", "| process | files opened |", "| --- | --- |"]
    lines += [f"| {name} | {role.files} |" for name, role in sorted(roles.items(), key=lambda pair: -pair[1].files)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
