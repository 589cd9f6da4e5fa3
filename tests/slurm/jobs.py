"""Jobs of `moerl launch` on the two nodes: submitted, waited for, looked into."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
from two_nodes import TwoNodes

RECIPE = "recipe=grpo-tiny-moe-1n2g-sync"
SMALL = (
    "model.scratch.num_layers=2", "model.scratch.hidden_size=32", "model.scratch.num_experts=4", "groups_per_step=4", "group_size=4",
    "num_steps=4", "save_every=2", "rollout.max_running=16", "deadlines.start_seconds=120",
)  # fmt: skip
ON_CPU = (
    "slurm.gpus_per_node=0", "placement.mode=colocated", "placement.nodes=2", "placement.gpus_per_node=1", "train.offload=all",
)  # fmt: skip
"""A train rank on each node, and the server with the first."""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that ended."""

    number: str
    state: str
    exit_code: int
    log: str
    directory: Path
    """Of its logs."""


class Jobs:
    def __init__(self, cluster: TwoNodes, tmp_path: Path, node_disk: Path):
        self.cluster = cluster
        self.output_dir = tmp_path / "runs"
        self.node_disk = node_disk
        self._tmp_path = tmp_path

    def launch(self, *overrides: str, on: tuple[str, ...] = ON_CPU, **options: object) -> "subprocess.CompletedProcess[str]":
        """`moerl launch` where Slurm's commands work; options as of subprocess.run."""
        passed = "slurm.pass_environment=[PYTHONPATH,OMP_NUM_THREADS,HF_HUB_OFFLINE,TMPDIR]"
        common = [RECIPE, *SMALL, f"output_dir={self.output_dir}", "slurm.start_seconds=90", passed]
        return self.cluster.run(sys.executable, "-m", "moerl", "launch", *common, *on, *overrides, **options)

    def submit(self, *overrides: str, on: tuple[str, ...] = ON_CPU) -> str:
        """The job's number."""
        done = self.launch(*overrides, on=on)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout.split()[1].rstrip(":")

    def end(self, number: str, seconds: float = 180) -> Job:
        """Waits for it."""
        self.cluster.wait_for(f"the end of job {number}", lambda: self.field(number, "JobState") in ENDED, seconds)
        directory = next(self.output_dir.glob("*/slurm"))
        # Of signals Slurm writes 0:SIGNAL.
        code = int(self.field(number, "ExitCode").split(":")[0])
        log = (directory / f"{number}.out").read_text()
        return Job(number=number, state=self.field(number, "JobState"), exit_code=code, log=log, directory=directory)

    def run(self, *overrides: str, on: tuple[str, ...] = ON_CPU) -> Job:
        return self.end(self.submit(*overrides, on=on))

    def start_again(self, number: str) -> None:
        """A job that was queued again would wait for two minutes. Not at once: slurmd takes it for the one that has just ended."""
        self.cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now+3seconds")

    def field(self, number: str, name: str) -> str:
        """Of what Slurm says about the job."""
        shown = self.cluster.run("scontrol", "--oneliner", "show", "job", number).stdout
        return next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}="))

    def python_that(self, script: str) -> str:
        """The setting for an interpreter that runs these shell lines first."""
        wrapper = self._tmp_path / "python"
        wrapper.write_text(f'#!/bin/sh\n{script}\nexec {sys.executable} "$@"\n')
        wrapper.chmod(0o755)
        return f"slurm.python={wrapper}"

    def processes(self) -> list[psutil.Process]:
        return [process for node in self.cluster.nodes for process in self.cluster.processes(node)]

    def assert_nothing_is_left(self) -> None:
        """No process, no directory. A job that a failed test left is cancelled first."""
        self.cluster.run("scancel", "--user=root")
        self.cluster.wait_for("idle nodes", lambda: self.cluster.run("sinfo", "-h", "-o", "%T").stdout == "idle\n", 120)
        left = self.processes()
        assert not left, [process.cmdline() for process in left]
        assert list(self.node_disk.iterdir()) == []
