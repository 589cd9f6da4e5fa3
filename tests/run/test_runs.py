"""One run that is stopped in every way a run can be, beside the same run never stopped: the same bits, and nothing left behind.

The stopped run is a chain of processes of one command, each ended at the first row from step 3 on, that is after a checkpoint and
before the end: kill -9, SIGTERM, Ctrl-C, a killed train rank, a killed rollout server. Then the run goes on to the end in this process.
"""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from whole_runs import (
    DIGIT,
    SMALL,
    SYNC,
    checkpoint_tensors,
    command,
    find,
    left_in_shared_memory,
    rows,
    shared_memory,
    users_environment,
    words_of,
)

from moerl import run
from moerl.check import load_checked
from moerl.planner.compare_run import compared
from moerl.train.checkpoint.checkpoint_check import read_state
from moerl.train.checkpoint.checkpoint_dirs import newest

OVERRIDES = ("num_steps=10", "algorithm.kl_coefficient=0.05", "rollout.max_restarts=0", DIGIT)
STEPS = list(range(1, 11))
SECONDS = 120

Stop = Callable[[psutil.Process, list[psutil.Process]], None]
"""Gets the driver's process and every one below it."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What one process of the command left."""

    exit_code: int
    family: list[str]
    """Command lines of the run's processes."""
    alive: list[str]
    """Those that outlived the driver by half a minute."""
    shared_memory: set[str]
    """New entries of /dev/shm."""
    stdout: str
    stderr: str
    rows: list[dict[str, float]]
    """Of metrics.jsonl at that time, without what a clock measured."""
    saved: int
    """Step of the newest checkpoint at that time."""


def go(output_dir: Path, stop: Stop | None = None) -> Ended:
    before = shared_memory()
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command(output_dir, *OVERRIDES), **pipes, start_new_session=True, env=users_environment())
    printed, family = [], []
    for line in process.stdout:
        printed.append(line)
        if (row := re.match(r" *(\d+)/", line)) and int(row[1]) >= 3 and not family:
            family = psutil.Process(process.pid).children(recursive=True)
            names = [words_of(child) for child in family]
            if stop is not None:
                stop(psutil.Process(process.pid), family)
    exit_code = process.wait(SECONDS)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert family, f"no row from step 3 on: {process.communicate()}"
    return Ended(
        exit_code=exit_code,
        family=names,
        alive=[words_of(child) for child in alive],
        shared_memory=left_in_shared_memory(before),
        stdout="".join(printed),
        stderr=process.communicate()[1],
        rows=rows(output_dir),
        saved=read_state(newest(output_dir / SYNC / "checkpoints"))["version"],
    )


STOPS: dict[str, Stop] = {
    "kill -9": lambda driver, family: driver.kill(),
    "SIGTERM": lambda driver, family: driver.terminate(),
    "Ctrl-C": lambda driver, family: os.killpg(driver.pid, signal.SIGINT),  # a terminal sends it to the whole group
    "rank": lambda driver, family: find(family, "ray::TrainWorker").kill(),
    "server": lambda driver, family: find(family, "moerl.rollout.engines.hf").kill(),
}
every_stop = pytest.mark.parametrize("how", STOPS)


@pytest.fixture(scope="module", autouse=True)
def ctrl_c_reaches_children():
    """A shell starts what it runs in the background with this signal ignored, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("never-stopped")
    return output_dir, go(output_dir)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("stopped")
    return output_dir, {how: go(output_dir, stop) for how, stop in STOPS.items()}


@pytest.fixture(scope="module")
def continued(stopped, shared_ray):
    """Its directory, when it is at its end."""
    output_dir = stopped[0]
    run.train(load_checked([f"recipe={SYNC}", *SMALL, *OVERRIDES, f"output_dir={output_dir}"]))
    return output_dir


# -- bits ------------------------------------------------------------------------------------------------------


def test_ranks_and_the_server_are_forks_of_processes_that_have_imported_what_they_need(never_stopped):
    output_dir, ended = never_stopped
    assert sum(line.split()[:1] == ["moerl.cluster.forks"] for line in ended.family) == 2
    logs = [output_dir / SYNC / "logs" / f"rank-{rank}.log" for rank in (0, 1)]
    assert all(re.search(r"importing Megatron took 0\.\d s", log.read_text()) for log in logs)


def test_a_run_ends_with_one_row_per_step_and_the_path_of_its_report(never_stopped):
    output_dir, ended = never_stopped
    assert ended.exit_code == 0, ended.stderr
    assert [row["step"] for row in ended.rows] == STEPS
    assert ended.stdout.splitlines()[-1] == f"report: {output_dir / SYNC / 'report.html'}"


def test_a_run_is_set_beside_its_plan(never_stopped):
    """What follows from the layout is held to the byte; the process holds what every process does."""
    text = compared(never_stopped[0] / SYNC)
    ratios = dict(re.findall(r"^ *(\S.*?)  +[\d.]+  +[\d.-]+  +([\d.-]+)$", text, re.MULTILINE))
    exact = ("weights", "reference", "gradients")
    assert {kind: ratios[kind] for kind in exact} == dict.fromkeys(exact, "1.000")
    assert 0.99 < float(ratios["optimizer"]) <= 1.0  # a shard may end in padding, which has no states
    assert ratios["all else allocated"] == "-"  # no GPU
    assert 0.1 < float(ratios["host: the whole process"]) < 1.0


def test_trainer_and_server_agree_and_the_first_step_has_no_kl(never_stopped):
    first, *_, last = never_stopped[1].rows
    assert first["mismatch/mean"] < 1e-6
    assert first["train/kl_old"] == first["train/kl_reference"] == 0.0
    assert last["train/kl_reference"] > 0.0
    assert all(row["train/grad_norm"] > 0.1 for row in never_stopped[1].rows)


@every_stop
def test_the_same_command_gives_the_same_bits_however_often_it_was_stopped(never_stopped, stopped, how):
    rows = stopped[1][how].rows
    assert len(rows) >= 3
    assert rows == never_stopped[1].rows[: len(rows)]


def test_a_stopped_run_ends_with_each_step_once_and_the_same_weights_and_optimizer(never_stopped, continued):
    assert rows(continued) == never_stopped[1].rows
    tensors, expected = (checkpoint_tensors(output_dir / SYNC) for output_dir in (continued, never_stopped[0]))
    assert tensors.keys() == expected.keys()
    assert {name for name, bits in tensors.items() if bits != expected[name]} == set()
    assert any("exp_avg" in name for name in tensors)
    assert any(name.startswith("embedding") for name in tensors)


# -- what is left ----------------------------------------------------------------------------------------------


@every_stop
def test_no_process_and_no_shared_memory_is_left(stopped, how):
    ended = stopped[1][how]
    for part in ("ray::TrainWorker", "moerl.rollout.engines.hf", "moerl.rewards.reward_supervisor", "raylet", "gcs_server"):
        assert any(part in line for line in ended.family), part
    assert ended.alive == []
    assert ended.shared_memory == set()


def test_no_process_and_no_shared_memory_is_left_by_a_run_that_was_not_stopped(never_stopped):
    assert never_stopped[1].alive == []
    assert never_stopped[1].shared_memory == set()


# -- what is said ----------------------------------------------------------------------------------------------


def test_every_way_to_stop_has_its_exit_code(stopped):
    assert {how: ended.exit_code for how, ended in stopped[1].items()} == {
        "kill -9": -signal.SIGKILL, "SIGTERM": 143, "Ctrl-C": 130, "rank": 76, "server": 76,
    }  # fmt: skip


@pytest.mark.parametrize(("how", "word"), [("SIGTERM", "interrupted"), ("Ctrl-C", "interrupted"), ("rank", "failed")])
def test_the_summary_says_how_the_run_ended(stopped, how, word):
    assert re.search(rf"(?m)^{word}$", stopped[1][how].stdout)


def complaints(ended):
    """Lines of stderr that are not a bar of progress, nor what a torch built for CUDA says of a toolkit (nvcc) where no GPU is."""
    harmless = ("Writing model shards", "No CUDA runtime is found, using CUDA_HOME=")
    return [line for line in ended.stderr.splitlines() if line and not any(words in line for words in harmless)]


def test_a_finished_run_says_so_and_complains_about_nothing(never_stopped):
    assert re.search(r"(?m)^finished$", never_stopped[1].stdout)
    assert complaints(never_stopped[1]) == []


def test_a_finished_run_that_is_started_again_starts_nothing(never_stopped):
    run_dir = never_stopped[0] / SYNC
    log = (run_dir / "run.log").read_text()
    again = subprocess.run(command(never_stopped[0], *OVERRIDES), capture_output=True, text=True, env=users_environment(), timeout=SECONDS)
    assert (again.returncode, again.stdout, again.stderr) == (0, f"finished before; report: {run_dir / 'report.html'}\n", "")
    assert (run_dir / "run.log").read_text() == log


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C"])
def test_an_interrupted_run_complains_about_nothing(stopped, how):
    assert complaints(stopped[1][how]) == (["moerl: stopped: SIGTERM; the same command continues the run"] if how == "SIGTERM" else [])


def test_a_run_that_got_sigterm_has_saved_its_last_step(stopped):
    assert stopped[1]["SIGTERM"].saved == stopped[1]["SIGTERM"].rows[-1]["step"]


def test_a_killed_rank_is_named_with_what_it_did(stopped):
    message = stopped[1]["rank"].stderr
    rank = re.search(r"(?m)^moerl: rank ([01]) of 2 failed in \w+, on node \S+$", message)[1]
    assert "\n    it wrote no crash into its log: it was killed from outside, as by signal 9\n" in message
    run_dir = stopped[0] / SYNC
    failed, log, more = message.splitlines()[-3:]
    assert re.fullmatch(rf"failed: rank {rank} of 2 on node \S+, in \w+, at step [4-9]", failed)
    assert (log, more) == (f"log: {run_dir}/logs/rank-{rank}.log", f"more: {run_dir}/failure.txt")


def test_a_killed_server_is_named_with_its_end_and_its_last_log_lines(stopped):
    message = stopped[1]["server"].stderr
    assert re.search(r"(?s)\nmoerl: .*127\.0\.0\.1:\d+: the server ended by signal 9 \(Killed\)\n", "\n" + message)
    assert re.search(r"last lines of .*rollout-0\.log:\n    .*INFO moerl\.rollout\.server\.server_main: serving on port", message)
    failed, log, _ = message.splitlines()[-3:]
    assert re.fullmatch(r"failed: rollout server 127\.0\.0\.1:\d+ on node \S+, in \w+, at step [4-9]", failed)
    assert log == f"log: {stopped[0] / SYNC}/logs/rollout-0.log"


@pytest.mark.parametrize("how", ["rank", "server"])
def test_a_failure_is_one_message_without_a_traceback_of_the_driver(stopped, how):
    assert stopped[1][how].stderr.count("moerl: ") == 1
    assert "in main" not in stopped[1][how].stderr
