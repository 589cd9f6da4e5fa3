"""Allocation that Slurm gave the job: who this node is, what each node has, and whether that is what the run needs."""

import importlib.metadata
import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import psutil

import moerl
from moerl.cluster.topology import expand
from moerl.config.schema.job_config import SlurmConfig
from moerl.hardware.hardware_tools import Absent, run_tool
from moerl.types.errors import MoerlError

T = TypeVar("T")

_RAY_DAEMONS = ("raylet", "gcs_server")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """Place of this process in its job. Two nodes may share a host, so that nothing follows from the host's name."""

    job: str
    """Job id and how often it was requeued, e.g. 1234-0."""
    index: int
    """0: the first node, which leads."""
    names: tuple[str, ...]
    """Names of all nodes, by index."""

    @property
    def name(self) -> str:
        return self.names[self.index]

    @property
    def is_first_try(self) -> bool:
        """True: the job was not queued again yet."""
        return self.job.endswith("-0")


def place_of(environment: Mapping[str, str]) -> JobPlace:
    """Raises MoerlError outside of a Slurm step."""
    try:
        job = f"{environment['SLURM_JOB_ID']}-{environment.get('SLURM_RESTART_COUNT', '0')}"
        index, names = int(environment["SLURM_NODEID"]), tuple(expand(environment["SLURM_STEP_NODELIST"]))
    except KeyError as error:
        raise MoerlError(f"{error.args[0]} is not set: moerl node runs in a Slurm step, which the script of moerl launch makes") from error
    if names[index] != environment["SLURMD_NODENAME"]:
        raise MoerlError(f"Slurm calls this node {environment['SLURMD_NODENAME']}, and node {index} of {names} is {names[index]}")
    return JobPlace(job=job, index=index, names=names)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedNode:
    """Facts that a node tells the first one before anything is started."""

    name: str
    gpus: tuple[str, ...]
    """Model of each."""
    num_cpus: int
    versions: dict[str, str]
    """Ray refuses or breaks where these differ between nodes."""
    complaints: tuple[str, ...] = ()
    """Why the job cannot use this node."""


def node_facts(place: JobPlace, slurm: SlurmConfig, *, complaints: tuple[str, ...]) -> AllocatedNode:
    """`complaints`: those that are known already."""
    gpus, of_gpus = _gpus() if slurm.gpus_per_node else ((), ())
    versions = {name: importlib.metadata.version(name) for name in ("ray", "torch")}
    return AllocatedNode(
        name=place.name,
        gpus=gpus,
        num_cpus=len(os.sched_getaffinity(0)),
        versions={"python": platform.python_version(), "moerl": moerl.__version__, **versions},
        complaints=(*complaints, *of_gpus),
    )


def _gpus() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(models, complaints)"""
    rows: list[list[str]] = []
    for query in ("--query-gpu=name", "--query-compute-apps=pid,used_memory"):
        said = run_tool("nvidia-smi", query, "--format=csv,noheader")
        if isinstance(said, Absent):
            return (), (said.reason,)
        rows.append([line.strip() for line in said.splitlines() if line.strip()])
    models, used = rows
    return tuple(models), tuple(f"GPU memory is in use by a process that is not of this job: pid {row}" for row in used)


def foreign_rays() -> Iterator[str]:
    """Ray daemons on this node, each for people. They do not disturb the job, which has ports, a token and directories of its own."""
    for process in psutil.process_iter(["pid", "name", "username"]):
        if process.info["name"] in _RAY_DAEMONS:
            yield f"{process.info['name']} of {process.info['username']}, pid {process.info['pid']}"


def too_few_nodes(place: JobPlace, slurm: SlurmConfig, needed: int) -> str | None:
    """From Slurm's word alone, before any node was asked."""
    have = len(place.names) * slurm.gpus_per_node
    if not slurm.gpus_per_node or have >= needed:
        return None
    return f"the recipe needs {needed} GPUs, and the allocation has {have}: {_nodes(place.names)} of {slurm.gpus_per_node}"


def check_allocation(nodes: Sequence[AllocatedNode], slurm: SlurmConfig, needed: int) -> list[str]:
    """Every reason for which these nodes cannot run the job, each with the nodes it is about."""
    complaints = [f"{node.name}: {complaint}" for node in nodes for complaint in node.complaints]
    return [*complaints, *_gpu_problems(nodes, slurm, needed), *_version_problems(nodes)]


def _gpu_problems(nodes: Sequence[AllocatedNode], slurm: SlurmConfig, needed: int) -> Iterator[str]:
    wanted = slurm.gpus_per_node
    if not wanted:
        return
    have = sum(len(node.gpus) for node in nodes)
    if have < needed:
        yield f"the recipe needs {needed} GPUs, and the allocation has {have} on {_nodes([n.name for n in nodes])}"
    for count, names in sorted(_grouped((len(node.gpus), node.name) for node in nodes).items()):
        if count != wanted:
            yield f"slurm.gpus_per_node={wanted}, but {count} GPUs on {_nodes(names)}"
    models = _grouped((model, node.name) for node in nodes for model in sorted(set(node.gpus)))
    if len(models) > 1:
        kinds = "; ".join(f"{model} on {_nodes(names)}" for model, names in sorted(models.items()))
        yield f"GPUs of different models, all as slow as the slowest: {kinds}; slurm.constraint= or slurm.exclude= chooses"


def _version_problems(nodes: Sequence[AllocatedNode]) -> Iterator[str]:
    for package in nodes[0].versions:
        found = _grouped((node.versions[package], node.name) for node in nodes)
        if len(found) > 1:
            yield f"{package} differs: " + "; ".join(f"{version} on {_nodes(names)}" for version, names in sorted(found.items()))


def _grouped(pairs: Iterable[tuple[T, str]]) -> dict[T, list[str]]:
    groups: dict[T, list[str]] = defaultdict(list)
    for key, name in pairs:
        groups[key].append(name)
    return dict(groups)


def _nodes(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{len(names)} node{'s' if len(names) > 1 else ''} ({shown})"
