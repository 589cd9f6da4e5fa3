"""Kills a random process of a job on two nodes with SIGKILL at a random point, again and again; compares with a job that was left alone:

    python tests/slurm/kill_series.py --rounds 20 --seed 0

Each job is queued again (by its own script, or here where it failed), and must finish with exit code 0, with the undisturbed job's prompts
and metrics, and leave no process, no shared memory and no directory. Prints a row for each; exit code 1 if any differs.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "run"))

from jobs import ENDED, Jobs
from two_nodes import TwoNodes, why_not_here
from whole_runs import rows

from moerl.observe.dumps import dumped_steps
from moerl.observe.records import read_records

NUM_STEPS = 16
OVERRIDES = (
    f"num_steps={NUM_STEPS}", "save_every=2", "observe.dump_every=1", "observe.dump_groups=4",
    "reward.terms.repeat={kind: format, pattern: \".*[0-9].*\"}",
)  # fmt: skip
_RUN = "grpo-tiny-moe-1n2g-sync"
_BRING_UP = (("n0.log", "n1 is here"), ("n0.log", "Ray runs on"), ("run.log", "phase start begins"), ("run.log", ": rank; patches: "))
_PHASES = ("rollout", "switch", "update", "save", "push")
_SHARE_OF_BRING_UP = 0.25
_KINDS = (
    ("gcs/gcs_server ", "gcs_server"), ("raylet/raylet ", "raylet"), ("ray::TrainWorker", "train rank"), ("ray::Collector", "collector"),
    ("ray::DashboardAgent", "Ray's agent"), ("ray::RuntimeEnvAgent", "Ray's agent"), ("dashboard/agent", "Ray's agent"),
    ("runtime_env/agent", "Ray's agent"), ("ray::", "other Ray worker"), ("default_worker.py", "other Ray worker"),
    ("moerl.rewards", "reward worker"), ("moerl.slurm.ray_start", "ray start"), ("ray.util.client", "client server of Ray"),
    ("/ray/", "other daemon of Ray"),
    ("-m moerl node", "node process"), ("-m moerl train", "driver"),
    ("moerl.rollout", "rollout server"), ("slurm_script", "job script"), ("srun", "srun"),
)  # fmt: skip
"""Words of a command line -> what it is; the first that fits."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """When to kill: once the file has the text `count` times."""

    file: str
    text: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.text.removeprefix('phase ').removesuffix(' begins')} {self.count}"


@dataclass(frozen=True, kw_only=True)
class Round:
    """What came of one kill."""

    point: Point
    victim: str
    command: str
    end: str
    """Of the try that was disturbed."""
    faults: tuple[str, ...]
    cause: str
    end_seconds: float
    """From the kill to the end of the try."""
    seconds: float


def any_point(rng: random.Random) -> Point:
    if rng.random() < _SHARE_OF_BRING_UP:
        file, text = rng.choice(_BRING_UP)
        return Point(file=file, text=text)
    return Point(file="run.log", text=f"phase {rng.choice(_PHASES)} begins", count=rng.randrange(1, NUM_STEPS // 2))


def kind_of(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    return next((kind for text, kind in _KINDS if text in words), "other")


def is_reached(point: Point, run_dir: Path) -> bool:
    file = next(run_dir.rglob(point.file), None)
    return file is not None and file.read_text(errors="replace").count(point.text) >= point.count


def kill_one(jobs: Jobs, rng: random.Random) -> tuple[str, str]:
    """Every process of the job is as likely as the others. (what it was and where, its command line)"""
    while True:
        node, process = rng.choice([(node, process) for node in jobs.cluster.nodes for process in jobs.cluster.processes(node)])
        try:
            kind, words = kind_of(process), " ".join(process.cmdline())
            process.kill()
        except psutil.NoSuchProcess:
            continue
        return f"{kind} on {node}", words


def prompts(jobs: Jobs) -> dict[int, list[tuple[int, str]]]:
    """Step -> the prompt of every sample trained on, with its place in the order of draws."""
    return {
        step: [(record["prompt_index"], record["prompt"]) for record in read_records(file)]
        for step, file in dumped_steps(jobs.output_dir / _RUN / "samples").items()
    }


def disturbed(jobs: Jobs, undisturbed: Jobs, rng: random.Random) -> Round:
    began, run_dir, point = time.monotonic(), jobs.output_dir / _RUN, any_point(rng)
    number = jobs.submit(*OVERRIDES)
    jobs.cluster.wait_for(f"{point}", lambda: is_reached(point, run_dir), 180)
    victim, command = kill_one(jobs, rng)
    killed = time.monotonic()
    end = queued_again(jobs, number)
    end_seconds = time.monotonic() - killed
    first_try = (run_dir / "slurm" / f"{number}.out").read_text()
    if end != "COMPLETED":
        jobs.start_again(number)
    job = jobs.end(number, 300)
    faults = [] if (job.state, job.exit_code) == ("COMPLETED", 0) else [f"ended as {job.state}, exit code {job.exit_code}"]
    faults += [f"{what} differ" for what, differ in differences(jobs, undisturbed) if differ]
    faults += left_of(jobs)
    seconds = time.monotonic() - began
    return Round(
        point=point,
        victim=victim,
        command=command,
        end=end,
        faults=tuple(faults),
        cause=cause_in(first_try),
        end_seconds=end_seconds,
        seconds=seconds,
    )


def queued_again(jobs: Jobs, number: str) -> str:
    """How the try ended: the state of a job that ended (then queued again here, unless it is COMPLETED), or "queued again by itself"."""
    jobs.cluster.wait_for("the end of the try", lambda: jobs.field(number, "JobState") in {*ENDED, "PENDING"}, 240)
    state = jobs.field(number, "JobState")
    if state == "PENDING":
        return "queued again by itself"
    if state != "COMPLETED":
        done = jobs.cluster.run("scontrol", "requeue", number)
        assert done.returncode == 0, done.stderr
        jobs.cluster.wait_for("the job in the queue", lambda: jobs.field(number, "JobState") == "PENDING")
    return state


def differences(jobs: Jobs, undisturbed: Jobs) -> Iterator[tuple[str, bool]]:
    yield "prompts", prompts(jobs) != prompts(undisturbed)
    yield "metrics", of_training(jobs) != of_training(undisturbed)


def of_training(jobs: Jobs) -> list[dict[str, float]]:
    """Metrics without counts of servers that were started again."""
    return [{name: value for name, value in row.items() if not name.startswith("fleet/")} for row in rows(jobs.output_dir)]


def left_of(jobs: Jobs) -> list[str]:
    """Processes, shared memory and directories, once Slurm says that the nodes are idle."""
    jobs.cluster.wait_for("idle nodes", lambda: jobs.cluster.run("sinfo", "-h", "-o", "%T").stdout == "idle\n")
    left = [f"process left: {' '.join(process.cmdline())}" for process in jobs.processes()]
    for node in jobs.cluster.nodes:
        left += [f"/dev/shm/{name} left on {node}" for name in jobs.cluster.run("ls", "/dev/shm", node=node).stdout.split()]
    return left + [f"directory left: {path.name}" for path in jobs.node_disk.iterdir()]


def cause_in(log: str) -> str:
    """The lines that say why the try ended."""
    begins = ("moerl:", "failed:", "srun: error", "slurmstepd: error")
    said = [line for line in log.splitlines() if line.startswith(begins) or "the job is queued again" in line]
    return " | ".join(line[:160] for line in said)


@contextmanager
def new_jobs(cluster: TwoNodes, keep: Path | None) -> Iterator[Jobs]:
    """`keep`: where what the jobs wrote is copied."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as node_disk:
        os.environ["TMPDIR"] = node_disk
        jobs = Jobs(cluster, Path(directory), Path(node_disk))
        try:
            yield jobs
        finally:
            if keep is not None and jobs.output_dir.exists():
                shutil.copytree(jobs.output_dir, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoints", "model"))


def series(cluster: TwoNodes, *, numbers: Sequence[int], seed: int, keep: Path | None) -> Iterator[Round]:
    with new_jobs(cluster, None if keep is None else keep / "undisturbed") as undisturbed:
        job = undisturbed.run(*OVERRIDES)
        assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
        for number in numbers:
            with new_jobs(cluster, None if keep is None else keep / str(number)) as jobs:
                yield disturbed(jobs, undisturbed, random.Random(f"{seed} {number}"))


def row(each: Round) -> str:
    times, verdict = f"{each.end_seconds:4.0f} s of {each.seconds:4.0f} s", "; ".join(each.faults) if each.faults else "ok"
    return f"{each.victim:28} at {each.point!s:16} {each.end:22} {times}  {verdict}\n     {each.command[:140]}\n     {each.cause}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=1, help="number of the first round, to repeat one")
    parser.add_argument("--keep", type=Path, help="directory for what the jobs wrote")
    arguments = parser.parse_args()
    if reason := why_not_here():
        print(f"no Slurm can be started here: {reason}", file=sys.stderr)
        return 2
    os.environ.update({"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    good = 0
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as root:
        cluster = TwoNodes(Path(root))
        try:
            numbers = range(arguments.first, arguments.first + arguments.rounds)
            done = series(cluster, numbers=numbers, seed=arguments.seed, keep=arguments.keep)
            for number, each in zip(numbers, done, strict=True):
                good += not each.faults
                print(f"{number:3d}  {row(each)}", flush=True)
        finally:
            cluster.close()
    print(f"{good} of {arguments.rounds}")
    return 0 if good == arguments.rounds else 1


if __name__ == "__main__":
    sys.exit(main())
