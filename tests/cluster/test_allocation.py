"""What Slurm gave a job: names of nodes, and whether they have what the run needs."""

from dataclasses import replace

import pytest

from moerl.config.schema.job_config import SlurmConfig
from moerl.slurm.allocation import AllocatedNode, JobPlace, check_allocation, node_facts, place_of, too_few_nodes
from moerl.types.errors import MoerlError

STEP = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[0-1]", "SLURMD_NODENAME": "n1"}


def node(index: int, *gpus: str, **versions: str) -> AllocatedNode:
    return AllocatedNode(name=f"n{index}", gpus=gpus, num_cpus=8, versions={"python": "3.11.2", "ray": "2.60.0", **versions})


def test_a_requeued_job_is_another_one_for_its_files():
    assert place_of(STEP) == JobPlace(job="7-0", index=1, names=("n0", "n1"))
    assert place_of({**STEP, "SLURM_RESTART_COUNT": "2"}).job == "7-2"


def test_outside_of_a_step_it_says_what_is_missing():
    with pytest.raises(MoerlError, match="SLURM_JOB_ID is not set: moerl node runs in a Slurm step"):
        place_of({})


def test_equal_nodes_with_enough_gpus_are_accepted():
    assert check_allocation([node(0, "H100", "H100"), node(1, "H100", "H100")], SlurmConfig(gpus_per_node=2), needed=4) == []


def test_every_reason_is_given_at_once():
    nodes = [node(0, "H100", "H100"), node(1, "A100"), replace(node(2, "H100", "H100", ray="2.61.0"), complaints=("its disk is full",))]
    refusals = check_allocation(nodes, SlurmConfig(gpus_per_node=2), needed=6)
    assert [refusal.split(":")[0] for refusal in refusals] == [
        "n2",
        "the recipe needs 6 GPUs, and the allocation has 5 on 3 nodes (n0, n1, n2)",
        "slurm.gpus_per_node=2, but 1 GPUs on 1 node (n1)",
        "GPUs of different models, all as slow as the slowest",
        "ray differs",
    ]


def test_nodes_without_gpus_are_not_asked_for_any():
    assert check_allocation([node(0), node(1)], SlurmConfig(gpus_per_node=0), needed=4) == []
    assert too_few_nodes(JobPlace(job="7-0", index=0, names=("n0",)), SlurmConfig(gpus_per_node=0), 4) is None


def test_too_few_nodes_are_seen_without_asking_them():
    place = JobPlace(job="7-0", index=0, names=tuple(f"n{index}" for index in range(31)))
    said = too_few_nodes(place, SlurmConfig(gpus_per_node=8), 256)
    assert said is not None
    assert said.startswith("the recipe needs 256 GPUs, and the allocation has 248: 31 nodes (n0, n1, ")
    assert too_few_nodes(place, SlurmConfig(gpus_per_node=8), 248) is None


@pytest.mark.parametrize(
    ("program", "gpus", "complaints"),
    [
        (None, (), ("nvidia-smi is not on PATH",)),
        (
            "echo 'Unable to determine the device handle' >&2; exit 15",
            (),
            ("nvidia-smi ended with code 15: Unable to determine the device handle",),
        ),
        ('case "$1" in *name) echo H100; echo H100;; esac', ("H100", "H100"), ()),
        (
            'case "$1" in *name) echo H100;; *) echo "77, 900 MiB";; esac',
            ("H100",),
            ("GPU memory is in use by a process that is not of this job: pid 77, 900 MiB",),
        ),
    ],
)
def test_a_node_tells_its_gpus_and_what_speaks_against_them(program, gpus, complaints, tmp_path, monkeypatch):
    if program is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = node_facts(place_of(STEP), SlurmConfig(gpus_per_node=2), complaints=())
    assert (facts.gpus, facts.complaints) == (gpus, complaints)
