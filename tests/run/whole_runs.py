"""Start, watch and end `moerl train`; compare what two runs wrote; see that nothing is left of one."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed.checkpoint as dcp

from moerl.cluster.forks.fork_server import VARIABLE
from moerl.train.checkpoint.checkpoint_dirs import newest

SMALL = (
    "model.scratch.num_layers=2", "model.scratch.hidden_size=32", "model.scratch.num_experts=4", "groups_per_step=4", "group_size=4",
    "num_steps=6", "save_every=2", "rollout.max_running=16",
)  # fmt: skip
DIGIT = 'reward.terms.repeat={kind: format, pattern: ".*[0-9].*"}'
"""Random completions score 0 and 1 about equally often, so that every step has a gradient."""
PROCESSES = {
    "driver": r" -m moerl train ",
    "rank": r"^ray::TrainWorker",
    "rollout server": r" -m moerl\.rollout\.engines\.hf ",
    "collector": r"^ray::CollectorActor",
    "reward worker": r"moerl\.rewards\.reward_supervisor",
    "gcs_server": r"/gcs_server ",
    "raylet": r"/raylet/raylet ",
    "dashboard agent": r"^ray::DashboardAgent",
    "runtime env agent": r"^ray::RuntimeEnvAgent",
    "fork server": r"^moerl\.cluster\.forks",
    "fork server of ranks": r"^moerl\.cluster\.forks",
}
"""Every process of a run but the one that the user started, by its command line; the two fork servers in the order of their start."""
SYNC, ASYNC, ADD = "grpo-tiny-moe-1n2g-sync", "dapo-tiny-moe-1n2g-async", "grpo-tiny-add-1n2g-sync"


def command(output_dir: Path, *overrides: str, recipe: str = SYNC) -> list[str]:
    return [sys.executable, "-m", "moerl", "train", f"recipe={recipe}", *SMALL, f"output_dir={output_dir}", *overrides]


def train(output_dir: Path, *overrides: str, recipe: str = SYNC, name: str | None = None) -> list[dict]:
    """A whole run inside this process; its rows. `name`: None: the recipe's."""
    from moerl import run
    from moerl.check import load_checked

    named = [] if name is None else [f"name={name}"]
    run.train(load_checked([f"recipe={recipe}", *SMALL, f"output_dir={output_dir}", *named, *overrides]))
    return rows(output_dir, recipe if name is None else name)


def users_environment() -> dict[str, str]:
    """Without what tests of one process share: a run has a Ray and forks of its own, as a user's."""
    return {name: value for name, value in os.environ.items() if name not in (VARIABLE, "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}


def run(
    output_dir: Path, *overrides: str, recipe: str = SYNC, seconds: float = 180, env: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(output_dir, *overrides, recipe=recipe), capture_output=True, text=True, timeout=seconds, env=env)


def start(output_dir: Path, *overrides: str, env: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(command(output_dir, *overrides), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def wait_for_step(process: "subprocess.Popen[str]", step: int) -> list[psutil.Process]:
    """Blocks until the row of `step` is printed; every process of the run at that moment."""
    for line in process.stdout:
        if line.strip().startswith(f"{step}/"):
            return psutil.Process(process.pid).children(recursive=True)
    raise AssertionError(f"the run ended before step {step}: {process.stderr.read()[-3000:]}")


_OTHERS = {"idle worker": "^ray::IDLE", "server owner": "^ray::ProcessOwner"}
"""Processes of a run that are there for a moment, or on other nodes than the driver's."""


def listening(processes: list[psutil.Process]) -> set[tuple[str, str]]:
    """(kind of PROCESSES, "loopback", "node" or "all") for every TCP port that one of them listens on."""
    found = set()
    for process in processes:
        try:
            words = words_of(process)
            if not words.strip():  # it is ending: Linux takes its memory, and with it the words, before its files
                continue
            kind = next((kind for kind, known in (PROCESSES | _OTHERS).items() if re.search(known, words)), words.strip())
            addresses = [each.laddr.ip for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        except psutil.Error:  # it has ended meanwhile
            continue
        found |= {(kind, _reach(address)) for address in addresses}
    return found


def listened(process: "subprocess.Popen[str]", *others: psutil.Process) -> set[tuple[str, str]]:
    """The same until the run has ended, of it and of what is below `others`, also for a moment."""
    found: set[tuple[str, str]] = set()
    while process.poll() is None:
        family = [psutil.Process(process.pid), *others]
        found |= listening([*family, *(child for each in family for child in each.children(recursive=True))])
        time.sleep(0.05)
    return found


def ports_of(name: str) -> set[tuple[str, str]]:
    """(process, reach) of every row of docs/security.md below that comment."""
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    of_name = text.split(f"<!-- {name} -->")[1].split("<!--")[0]
    return set(re.findall(r"^\| ([a-z_ ]+) \| (loopback|node|all) \|", of_name, flags=re.MULTILINE))


def _reach(address: str) -> str:
    if address in ("0.0.0.0", "::"):
        return "all"
    return "loopback" if address in ("127.0.0.1", "::1", "::ffff:127.0.0.1") else "node"


def rows(output_dir: Path, recipe: str = SYNC) -> list[dict[str, float]]:
    """metrics.jsonl without what a clock measured, where memory was, what went to a server that came back, and the checkpoints:
    which step reports one is a matter of time."""
    lines = (output_dir / recipe / "metrics.jsonl").read_text().splitlines()
    return [
        {
            k: v
            for k, v in json.loads(line).items()
            if not k.startswith(("time/", "checkpoint/", "memory/", "residency/", "push/")) and k != "tokens/per_second"
        }
        for line in lines
    ]


def without_restarts(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name != "fleet/restarts"}


def shared_memory() -> set[str]:
    """Files of /dev/shm, but for those that another living process has open: they may be anybody's."""
    held = {inode for pid in psutil.pids() if pid != os.getpid() for inode in _held_by(pid)}
    return {entry.name for entry in os.scandir("/dev/shm") if entry.inode() not in held}


def left_in_shared_memory(before: set[str], prefix: str = "") -> set[str]:
    """New files of `shared_memory` whose names begin like this and that stay: another program's are there for a moment while it makes or
    removes them. Without a prefix all but SGLang's, of servers that other tests kill at the same time."""
    deadline, others = time.monotonic() + 10, () if prefix else ("sgl",)
    while (left := {name for name in shared_memory() - before if name.startswith(prefix) and not name.startswith(others)}) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    return left


def _held_by(pid: int) -> set[int]:
    """Inodes of /dev/shm; none of a process that has ended, or is another user's. The name in a mapping may be an earlier one: a
    semaphore gets its name when it is mapped already (glibc's sem_open)."""
    try:
        opened = [link.stat().st_ino for link in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(link).startswith("/dev/shm/")]
        mapped = re.findall(r"^(?:\S+ +){4}(\d+) +/dev/shm/", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
    except OSError:
        return set()
    return {*opened, *map(int, mapped)}


def assert_all_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive, [process.cmdline() for process in alive]


def find(processes: list[psutil.Process], text: str) -> psutil.Process:
    return next(process for process in processes if text in words_of(process))


def below(raylet: psutil.Process, text: str) -> list[psutil.Process]:
    """Processes of a node whose command has `text`."""
    return [process for process in raylet.children(recursive=True) if text in words_of(process)]


def words_of(process: psutil.Process) -> str:
    """Its command line; empty of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def checkpoint_tensors(run_dir: Path, model: str = "") -> dict[str, bytes]:
    """Every tensor of the newest checkpoint, weights and optimizer, as bytes. `model`: one beside the policy."""
    directory = newest(run_dir / "checkpoints") / model
    stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items() if hasattr(entry, "size")}
    dcp.load(tensors, checkpoint_id=directory, no_dist=True)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
