"""`moerl doctor` as a person and a job meet it: table, JSON, commands, exit codes; alone, in a Slurm step, on a Ray cluster."""

import io
import json
import os
import subprocess
import sys
from functools import partial

import psutil
import pytest
from rich.console import Console

from moerl.config.load import load
from moerl.doctor import reach_nodes
from moerl.doctor.checks.expected import expected_of
from moerl.doctor.checks.findings import Finding
from moerl.doctor.preflight import PreflightError, examine_nodes, fixes, merged, preflight, table
from moerl.doctor.reach_nodes import Slurm, join_slurm, on_slurm, slurm_step
from moerl.types.errors import ConfigError, MoerlError

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}


@pytest.fixture
def doctor(moerl, monkeypatch):
    """The command in this process; the one test of a Ray cluster and the other tasks of a step start one."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return partial(moerl, "doctor")


def started(*args, **environment):
    command = [sys.executable, "-m", "moerl", "doctor", *map(str, args)]
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(command, env=inherited | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process):
    out, errors = process.communicate(timeout=240)
    return process.returncode, out, errors


def test_fake_h100_are_read_judged_and_their_faults_come_with_commands(doctor, h100_node, tmp_path):
    file = tmp_path / "new" / "doctor.json"
    done = doctor("--no-measure", "--fix", "--gpus-per-node", 8, "--json", file, "--run-dir", tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(file.read_text())
    verdicts = {finding["check"]: finding["verdict"] for finding in found["findings"]}
    assert {verdicts[check] for check in ("ECC", "clocks", "NVLink", "NVSwitch fabric", "InfiniBand", "MIG")} == {"ok"}
    assert verdicts["GPUs"] == "fail"  # PyTorch cannot use them
    assert found["exit_code"] == 1
    settings = {setting["name"]: setting["value"] for node in found["network"].values() for setting in node}
    assert settings["NCCL_IB_HCA"].startswith("=mlx5_0:1,mlx5_1:1,")
    assert f"NCCL_IB_HCA={settings['NCCL_IB_HCA']}  # active InfiniBand ports at 400 Gb/s" in done.stdout
    assert "python -c 'import torch; torch.cuda.init()'" in done.stdout
    assert "0 skipped" not in done.stdout


def test_the_tasks_of_a_slurm_step_find_each_other_and_the_first_one_reports(doctor, tmp_path, monkeypatch):
    args = ("--run-dir", tmp_path, "--nodes", 2, "--json", tmp_path / "doctor.json")
    second = started(*args, **STEP, SLURM_PROCID="1")
    for name, value in {**STEP, "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    first = doctor(*args)
    assert ended(second) == (0, "", "")
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert (first.returncode, first.stderr) == (found["exit_code"], "")
    assert list(found["network"]) == ["n0", "n1"]
    assert found["bandwidth_gb_per_second"]["between_nodes"]["n0 - n1"] > 0
    assert "n0, n1" in first.stdout
    assert not list(tmp_path.glob(".doctor-*"))


def test_a_ray_cluster_is_examined_on_each_of_its_nodes_also_inside_a_slurm_step(tmp_path):
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
        cluster.wait_for_nodes()
        processes = [each for node in cluster.list_all_nodes() for each in node.all_processes.values()]
        own = {one.process.pid for each in processes for one in each}
        code, _, errors = ended(
            started("--json", tmp_path / "doctor.json", "--nodes", 2, **STEP, SLURM_PROCID="0", RAY_ADDRESS=cluster.address)
        )
    finally:
        cluster.shutdown()
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert (code, errors) == (found["exit_code"], "")
    assert len(found["network"]) == 2
    assert len(found["bandwidth_gb_per_second"]["between_nodes"]) == 1
    listed = " ".join(finding["found"] for finding in found["findings"] if finding["check"] == "other Ray")
    assert not [pid for pid in own if f" {pid} of" in listed], "the cluster's own daemons are no other Ray"


def test_preflight_raises_what_failed_with_its_fix(fake_tools, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    fake_tools(nvidia_smi="echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9")
    with pytest.raises(PreflightError, match=r"GPUs: nvidia-smi ended with code 9: NVIDIA-SMI has failed .*; fix: nvidia-smi; sudo dmesg"):
        preflight(load([DEMO, f"output_dir={tmp_path}"]))


def test_a_wrong_recipe_is_a_problem_of_the_configuration(doctor):
    done = doctor("recipe=none")
    assert (done.returncode, done.stdout) == (2, "")
    assert "1 problem in the configuration" in done.stderr


def test_what_a_recipe_needs_is_what_the_nodes_are_held_to(tmp_path):
    config = load([DEMO, f"output_dir={tmp_path}", "network.interface=lo"])
    expected = expected_of(config, nodes=2, gpus_per_node=1)
    assert (expected.ranks, expected.nodes, expected.gpus_per_node) == (2, 2, 1)
    assert expected.run_dir == config.run_dir
    assert expected.network.interface == "lo"


@pytest.mark.parametrize(
    ("overrides", "nodes", "gpus_per_node", "ranks", "server_gpus"),
    [
        ([DEMO], 1, None, 2, 0),
        (["recipe=grpo-qwen3-235b-32n8g-sync"], 32, 8, 256, 0),
        (["recipe=grpo-qwen3-235b-16n8g-sync", "placement.mode=separate", "placement.nodes=32"], 32, 8, 128, 128),
        ([DEMO, "slurm.gpus_per_node=0", "placement.nodes=2", "placement.gpus_per_node=2"], 2, None, 2, 0),
    ],
    ids=["one node", "colocated", "separate", "without GPUs"],
)
def test_nodes_and_gpus_that_there_must_be_are_those_of_the_recipe_s_placement(overrides, nodes, gpus_per_node, ranks, server_gpus):
    expected = expected_of(load(overrides))
    assert (expected.nodes, expected.gpus_per_node) == (nodes, gpus_per_node)
    assert (expected.ranks, expected.server_gpus) == (ranks, server_gpus)


def test_a_node_that_does_not_end_costs_no_findings(monkeypatch, tmp_path):
    """As when a command of its own hangs: it is told of, and ended."""
    monkeypatch.setattr(reach_nodes, "_END_SECONDS", 0.01)
    diagnosis = examine_nodes(expected_of(None, run_dir=tmp_path), seconds=0.1, measures=False)
    (silent,) = (finding for finding in diagnosis.findings if finding.check == "node")
    assert (silent.verdict, silent.found) == ("fail", "did not answer within 0.1 s")


def test_a_step_with_several_tasks_on_a_node_is_refused():
    with pytest.raises(ConfigError, match="the step has 16 tasks on 2 nodes(.|\n)*srun --nodes=2 --ntasks=2 --ntasks-per-node=1"):
        slurm_step(STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "16"})


def test_outside_of_a_step_there_is_no_step():
    assert slurm_step({}) is None
    assert slurm_step({"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0"}) is None  # the batch script itself


def test_without_a_shared_run_folder_a_task_says_so(tmp_path):
    step = Slurm(index=1, names=("n0", "n1"), step="1-0-0")
    with pytest.raises(MoerlError, match=r"n1: no .*\.doctor-1-0-0 within 0\.2 s; is the run folder shared with n0\?"):
        join_slurm(step, expected_of(None, run_dir=tmp_path), 0.2)


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path):
    file = tmp_path / "a_file"
    file.write_text("")
    step = Slurm(index=0, names=("n0", "n1"), step="1-0-0")
    with (
        pytest.raises(MoerlError, match="n0: the run folder cannot be written: .*a_file"),
        on_slurm(step, expected_of(None, run_dir=file), 1.0),
    ):
        raise AssertionError("the step must not begin")


def test_the_secret_of_a_step_is_in_a_file_that_only_its_user_reads_and_on_no_command_line(monkeypatch, tmp_path):
    monkeypatch.setattr(reach_nodes, "_END_SECONDS", 0.0)
    before = set(psutil.Process().children())
    with on_slurm(Slurm(index=0, names=("n0", "n1"), step="1-0-0"), expected_of(None, run_dir=tmp_path), 30.0) as launched:
        secret, file = launched.store.secret.key, tmp_path / ".doctor-1-0-0"
        assert (secret in file.read_text(), file.stat().st_mode & 0o777) == (True, 0o600)
        (node,) = set(psutil.Process().children()) - before
        assert secret not in " ".join([*node.cmdline(), *node.environ().values()])
        assert secret not in repr(launched)
    assert not file.exists()


def finding(node, check="ECC", found="0 uncorrected", verdict="ok", fix=""):
    return Finding(node=node, check=check, found=found, expected="", verdict=verdict, fix=fix)


def test_nodes_with_the_same_finding_share_a_row():
    rows = merged([finding("n0"), finding("n1"), finding("n2", found="GPU 3: 2", verdict="fail"), finding("n3")])
    assert [(row.node, row.verdict) for row in rows] == [("n0, n1, n3", "ok"), ("n2", "fail")]


def test_figures_of_healthy_nodes_share_a_row_and_checks_skipped_for_one_reason_too():
    rows = merged([finding("n0", found="5 GiB"), finding("n1", found="6 GiB")])
    assert [(row.node, row.found) for row in rows] == [("n0, n1", "5 GiB, 6 GiB")]
    gone = [finding(node, check, "nvidia-smi is not on PATH", "skipped") for check in ("ECC", "MIG") for node in ("n0", "n1")]
    assert [(row.node, row.check) for row in merged(gone)] == [("n0, n1", "ECC, MIG")]


def test_commands_are_given_for_failures_and_warnings_alone():
    lines = fixes(
        [finding("n0", fix="never"), finding("n1", verdict="warn", fix="sudo ecc"), finding("n2", verdict="fail", fix="sudo ecc")]
    )
    assert lines == ["# n1: ECC: 0 uncorrected\nsudo ecc", "# n2: ECC: 0 uncorrected\nsudo ecc"]


def test_many_nodes_are_counted():
    (row,) = merged([finding(f"n{index}") for index in range(32)])
    assert row.node == "n0, n1, n2, n3 and 28 more"


def test_no_end_of_a_path_is_lost_in_a_narrow_table():
    path = "/scratch/" + "x" * 60 + "/run-end"
    console = Console(width=60, file=io.StringIO())
    console.print(table([finding("n0", found=path)]))
    printed = console.file.getvalue()
    assert "/run-end" in printed
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed


def test_a_cluster_that_is_not_there_is_told_within_seconds(doctor, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    done = doctor("--no-measure", "--deadline", 1)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("moerl: RAY_ADDRESS = 127.0.0.1:1: the Ray cluster there cannot be joined: nothing answers there")


def test_an_empty_ray_address_is_none(doctor, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert "Traceback" not in doctor("--no-measure").stderr
