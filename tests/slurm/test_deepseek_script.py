"""The script of DeepSeek on 32 nodes of 8 GPUs, run by Slurm. In place of the hardware a nvidia-smi and an ibv_devinfo print files."""

import json
import os
import sys
from pathlib import Path

import pytest
from jobs import Jobs

pytestmark = pytest.mark.slurm

OUTPUTS = Path(__file__).parents[1] / "doctor" / "outputs"
TOOLS = {
    "nvidia-smi": """case "$*" in
    *--query-gpu=name\\ *) cut -d, -f2 h100_query.csv | sed 's/^ *//' ;;
    *compute-apps*) ;;
    *fabric*) cat h100_fabric.csv ;;
    *remapped*) cat h100_remapped.csv ;;
    *clocks_event_reasons*) cat h100_query.csv ;;
    *topo*) cat h100_topo.txt ;;
    *nvlink*) cat h100_nvlink.txt ;;
    *) echo "unexpected arguments: $*" >&2; exit 2 ;;
esac""",
    "ibv_devinfo": "cat ibv_devinfo.txt",
}
ON_TWO_NODES = (
    "placement.nodes=2", "model=tiny-moe", "data=tiny-repeat", "~train.layout", "train.layout={ranks:16,ep:4}",
    "train.mtp_loss=0", "~rollout.layout", "rollout.engine=hf", "rollout.num_servers=1", "rollout.max_response_tokens=8",
    "~reward.terms", "reward.terms={repeat:{kind:prefix}}",
)  # fmt: skip
"""What follows the script's name: a model that fits two nodes of 8 GPUs."""


@pytest.fixture
def deepseek(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script, where nodes have eight H100 and their adapters."""
    (tmp_path / "bin").mkdir()
    for name, body in TOOLS.items():
        tool = tmp_path / "bin" / name
        tool.write_text(f"#!/bin/sh\ncd {OUTPUTS}\n{body}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    passed = "slurm.pass_environment=[PYTHONPATH,OMP_NUM_THREADS,HF_HUB_OFFLINE,TMPDIR]"
    settings = (f"output_dir={jobs.output_dir}", f"slurm.python={sys.executable}", passed)
    done = jobs.cluster.run(sys.executable, "-m", "moerl", "launch", "recipe=grpo-deepseek-v3-32n8g-sync", *settings, "--dry-run")
    assert "#SBATCH --nodes=32" in done.stdout, done.stderr
    script = tmp_path / "job.sbatch"
    script.write_text(done.stdout)
    return script


def log_of(jobs: Jobs, script: Path, *arguments: str) -> str:
    """Of a job that fails, on two nodes."""
    log = script.with_suffix(".out")
    done = jobs.cluster.run("sbatch", "--wait", "--nodes=2", f"--output={log}", script, *arguments, timeout=400)
    assert done.returncode == 1, log.read_text()
    return log.read_text()


def test_an_allocation_of_two_nodes_is_refused_with_both_numbers(jobs: Jobs, deepseek: Path):
    log = log_of(jobs, deepseek)
    assert "the recipe needs 256 GPUs, and the allocation has 16: 2 nodes (n0, n1) of 8" in log
    assert "Traceback" not in log


def test_on_nodes_that_are_enough_everything_runs_until_the_doctor_misses_the_gpus(jobs: Jobs, deepseek: Path):
    """Nodes meet and are compared, Ray has 16 GPUs, the doctor examines both nodes and says what NCCL is told of their adapters."""
    log = log_of(jobs, deepseek, *ON_TWO_NODES)
    assert "Ray runs on 2 nodes" in log
    assert "slurm.preflight=false trains without it" in log
    found = json.loads(next(jobs.output_dir.rglob("doctor.json")).read_text())
    assert list(found["network"]) == ["n0", "n1"]
    settings = {setting["name"]: setting["value"] for setting in found["network"]["n1"]}
    assert settings["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_5:1,mlx5_6:1,mlx5_7:1,mlx5_8:1", "active InfiniBand ports"
    findings = {(finding["node"], finding["check"]): finding for finding in found["findings"]}
    assert (findings["all", "GPUs of all nodes"]["found"], findings["all", "GPUs of all nodes"]["verdict"]) == ("16", "ok")
    assert findings["n1", "InfiniBand"]["found"] == "8 ports at 400 Gb/s; left out: mlx5_4:1 at 100 Gb/s"
    assert findings["n1", "GPUs"]["found"] == "8 of NVIDIA H100 80GB HBM3, of which PyTorch can use 0"
    assert "report: " not in log
