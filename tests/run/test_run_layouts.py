"""Whole runs of other layouts and dtypes, and on a Ray cluster that was there before."""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from whole_runs import DIGIT, SMALL, SYNC, rows

from moerl import run
from moerl.check import load_checked

pytestmark = pytest.mark.slow

LAYOUTS = {
    "data parallel": {"ranks": 2, "ep": 1},
    "four ranks, tensor and expert parallel": {"ranks": 4, "tp": 2, "ep": 2},
    "one rank": {"ranks": 1, "ep": 1},
}


def train(output_dir, *overrides):
    run.train(load_checked([f"recipe={SYNC}", *SMALL, f"output_dir={output_dir}", "num_steps=3", DIGIT, *overrides]))
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


def test_bfloat16_trains_within_its_own_mismatch_limit(tmp_path):
    trained = train(tmp_path, "train.dtype=bfloat16", "weights.mismatch_limit=0.03")
    assert 1e-6 < trained[0]["mismatch/mean"] < 0.03


@pytest.fixture
def cluster(monkeypatch):
    """The processes of a Ray cluster with another owner."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}", "--num-cpus=2"]
    command = [*start, "--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
    assert any("Ray runtime started" in line for line in process.stdout)
    family = psutil.Process(process.pid).children(recursive=True)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    yield [psutil.Process(process.pid), *family]
    process.terminate()
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_a_run_uses_the_cluster_of_ray_address_and_leaves_it_running(tmp_path, cluster):
    assert len(train(tmp_path)) == 3
    assert all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in cluster)
    assert not any("TrainWorker" in child.name() for process in cluster for child in process.children())
