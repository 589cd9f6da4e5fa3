"""`moerl doctor` on a real Slurm: as a step of its own, and as what a job does before it trains."""

import json
import os
import sys

import pytest
from jobs import Jobs
from two_nodes import TwoNodes

pytestmark = pytest.mark.slurm


def test_a_step_with_a_task_on_each_node_examines_both(cluster: TwoNodes, tmp_path):
    options = ("--run-dir", tmp_path / "run", "--nodes", "2", "--json", tmp_path / "doctor.json")
    done = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "moerl", "doctor", *options, timeout=240)
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert done.returncode == found["exit_code"], done.stderr
    assert list(found["network"]) == ["n0", "n1"]
    assert found["bandwidth_gb_per_second"]["between_nodes"]["n0 - n1"] > 0
    reached = {finding["node"]: finding["verdict"] for finding in found["findings"] if finding["check"] == "reached by name"}
    assert reached == {"n0": "ok", "n1": "ok"}


@pytest.mark.matrix(turn=1)
def test_a_job_with_preflight_examines_its_nodes_through_its_own_ray_and_trains(jobs: Jobs):
    job = jobs.end(jobs.submit("slurm.preflight=true", "num_steps=1"), seconds=400)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    found = json.loads(next(job.directory.rglob("doctor.json")).read_text())
    assert list(found["network"]) == ["n0", "n1"]
    assert len(found["bandwidth_gb_per_second"]["between_nodes"]) == 1
    assert job.log.index("reached by name") < job.log.index("report: ")


def test_a_job_whose_nodes_cannot_carry_it_ends_before_it_trains(jobs: Jobs, tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    job = jobs.run("slurm.preflight=true")
    assert (job.state, job.exit_code) == ("FAILED", 1)
    assert "NVIDIA-SMI has failed because it could not communicate" in job.log
    assert "slurm.preflight=false trains without it" in job.log
    assert "report: " not in job.log
