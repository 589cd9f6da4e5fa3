"""Nodes as facts, for checks that look at nothing else: a healthy one of 8 H100, and one without GPUs."""

from dataclasses import replace
from pathlib import Path

from moerl.doctor.checks.host_checks import GIB
from moerl.doctor.checks.node_facts import UNLIMITED, Disk, NodeFacts
from moerl.hardware.hardware_tools import Absent
from moerl.hardware.infiniband import Doorbell, parse_ports
from moerl.hardware.nvidia import parse_gpus, parse_links, parse_topology

OUTPUTS = Path(__file__).parent / "outputs"
"""In the form that the tools print, put together from outputs in public threads of NCCL, DeepEP and azhpc-diagnostics."""


def output(name: str) -> str:
    return (OUTPUTS / name).read_text()


def h100_node(name: str = "n0", **changes: object) -> NodeFacts:
    facts = NodeFacts(
        name=name,
        hostname=name,
        boot_id=f"boot of {name}",
        gpus=parse_gpus(output("h100_query.csv"), output("h100_fabric.csv")),
        links=parse_links(output("h100_nvlink.txt")),
        topology=parse_topology(output("h100_topo.txt")),
        ports=parse_ports(output("ibv_devinfo.txt")),
        gpudirect="nvidia_peermem",
        doorbell=Doorbell(maps_peers=True, has_gdrdrv=False),
        sharp=Absent(reason="no network plugin for NCCL"),
        interfaces={"lo": ("127.0.0.1",), "bond0": ("10.1.0.7",)},
        own_addresses=("10.1.0.7",),
        torch_gpus=8,
        libcuda=12,
        open_files=(65536, 1048576),
        locked_bytes=UNLIMITED,
        locks_any_memory=False,
        disks=(disk("run folder"), disk("temp"), disk("/dev/shm", total=1000, free=990)),
        ram_bytes=2000 * GIB,
        free_ram_bytes=1900 * GIB,
        versions={
            "python": "3.12.3", "torch": "2.13.0", "megatron-core": "0.17.1", "transformer-engine": "2.10.0", "ray": "2.60.0",
            "transformers": "5.19.0", "CUDA": "12.9", "NCCL": "2.28.9",
        },
        engines={},
        ray_processes=(),
        gloo_interface="",
        settings=(),
    )  # fmt: skip
    return replace(facts, **changes)


def cpu_node(name: str = "n0", **changes: object) -> NodeFacts:
    gone, built = Absent(reason="nvidia-smi is not on PATH"), Absent(reason="this PyTorch is built without CUDA")
    versions = h100_node().versions | {"CUDA": built, "NCCL": built, "transformer-engine": Absent(reason="not installed")}
    ports = Absent(reason="ibv_devinfo is not on PATH")
    bare = h100_node(name, gpus=gone, links=gone, topology=gone, ports=ports, torch_gpus=0, libcuda=None, versions=versions, gpudirect=gone)
    return replace(bare, **changes)


def disk(purpose: str, *, total: float = 7000, free: float = 6000, refusal: str = "") -> Disk:
    """Sizes in GiB."""
    path = purpose if purpose.startswith("/") else "/scratch/run"
    return Disk(purpose=purpose, path=path, total_bytes=int(total * GIB), free_bytes=int(free * GIB), refusal=refusal)
