"""Whole runs of other layouts and dtypes, and on a Ray cluster that was there before."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from whole_runs import DIGIT, SMALL, SYNC, command, find, rows, words_of

from moerl import run
from moerl.check import load_checked
from moerl.cluster.forks.fork_server import VARIABLE

pytestmark = [pytest.mark.matrix, pytest.mark.usefixtures("shared_ray")]

LAYOUTS = {
    "data parallel": {"ranks": 2, "ep": 1},
    "four ranks, tensor and expert parallel": {"ranks": 4, "tp": 2, "ep": 2},
    "four ranks, interleaved pipeline and context parallel": {"ranks": 4, "pp": 2, "vpp": 2, "cp": 2, "ep": 2},
    "one rank": {"ranks": 1, "ep": 1},
}


def train(output_dir, *overrides):
    """Of four layers: a chunk of an interleaved pipeline has at least one."""
    small = [*SMALL, "model.scratch.num_layers=4", "num_steps=3", DIGIT]
    run.train(load_checked([f"recipe={SYNC}", *small, f"output_dir={output_dir}", *overrides]))
    return rows(output_dir)


@pytest.fixture(scope="module")
def expert_parallel(tmp_path_factory):
    return train(tmp_path_factory.mktemp("expert-parallel"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_expert_parallel_does(tmp_path, expert_parallel, name):
    """The first step samples with the same weights; its update differs by rounding alone."""
    trained = train(tmp_path, *(f"train.layout.{size}={value}" for size, value in LAYOUTS[name].items()))
    assert [row["step"] for row in trained] == [1, 2, 3]
    assert trained[0]["reward/mean"] == expert_parallel[0]["reward/mean"]
    assert trained[0]["train/grad_norm"] == pytest.approx(expert_parallel[0]["train/grad_norm"], rel=1e-4)
    assert trained[0]["train/entropy"] == pytest.approx(expert_parallel[0]["train/entropy"], rel=1e-6)


def test_a_run_that_sleeps_between_its_steps_trains_the_same_bits(tmp_path, expert_parallel):
    """And one whose activations are computed again the same but for rounding."""
    asleep = ("train.offload=all", "train.destroy_groups=true", "save_every=2")
    assert train(tmp_path / "asleep", *asleep) == expert_parallel
    again = train(tmp_path / "again", "train.recompute={kind:full}", "train.overlap_grad_reduce=true", "train.overlap_param_gather=true")
    assert again[-1]["train/grad_norm"] == pytest.approx(expert_parallel[-1]["train/grad_norm"], rel=1e-4)


def test_bfloat16_trains_within_its_own_mismatch_limit(tmp_path):
    trained = train(tmp_path, "train.dtype=bfloat16", "weights.mismatch_limit=0.03")
    assert 1e-6 < trained[0]["mismatch/mean"] < 0.03


@pytest.fixture
def cluster():
    """The environment variables of a Ray cluster with another owner, and its processes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", VARIABLE: ""}  # a server shows its environment if it is executed
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as temp_dir:  # short: its sockets' paths have a limit
        start = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}", "--num-cpus=2"]
        options = [*start, "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={temp_dir}"]
        process = subprocess.Popen(
            options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
        )
        assert any("Ray runtime started" in line for line in process.stdout)
        family = psutil.Process(process.pid).children(recursive=True)
        yield environment | {"RAY_ADDRESS": f"127.0.0.1:{port}"}, [psutil.Process(process.pid), *family]
        process.terminate()
        process.communicate(timeout=60)
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive


def test_a_run_uses_the_cluster_of_ray_address_and_leaves_it_running(tmp_path, cluster):
    """Its rollout server, which the driver starts, has the run's network settings."""
    environment, processes = cluster
    before = set(psutil.Process(processes[0].pid).children(recursive=True))
    own = ("train.environment.OF_RANKS=1", "rollout.environment.OF_SERVERS=2")
    told = command(tmp_path, "network.variables.NCCL_DEBUG=WARN", "network.interface=lo", *own)
    process = subprocess.Popen(told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    workers, of_server = [], {}
    for line in process.stdout:
        if line.strip().startswith("1/6"):
            started = set(psutil.Process(processes[0].pid).children(recursive=True)) - before
            workers = [child for child in started if words_of(child).startswith("ray::TrainWorker")]  # or, in a call, with its name behind
            of_server = find(psutil.Process(process.pid).children(recursive=True), "moerl.rollout.engines.hf").environ()
    assert process.wait() == 0
    assert (of_server["NCCL_DEBUG"], of_server["GLOO_SOCKET_IFNAME"]) == ("WARN", "lo")
    assert of_server["OF_SERVERS"] == "2" and "OF_RANKS" not in of_server
    assert "'OF_RANKS': '1'" in next((tmp_path).rglob("run.log")).read_text()
    assert len(workers) == 2
    assert psutil.wait_procs(workers, timeout=30)[1] == []
    assert all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in processes)
