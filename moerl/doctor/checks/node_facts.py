"""Facts of one node: gathered on the node, judged elsewhere. It crosses processes as JSON."""

import os
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

from moerl.doctor.checks.expected import Expectations
from moerl.doctor.checks.versions import TRANSFORMER_ENGINE, engine_versions, libcuda_version, trainer_versions
from moerl.hardware.hardware_tools import Absent
from moerl.hardware.network_settings import Hardware, Setting, find_hardware, network_settings, read_nccl_files, variables
from moerl.hardware.nvidia import NVLinks, find_links

UNLIMITED = resource.RLIM_INFINITY
_CAP_IPC_LOCK = 14
"""Its bit (linux/capability.h)."""
_SESSION = re.compile(r"session_[0-9_-]+")
"""Ray's name of a cluster, in the command line of each of its daemons."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    purpose: str
    """run folder, temp, /dev/shm"""
    path: str
    total_bytes: int
    free_bytes: int
    refusal: str = ""
    """Why nothing can be written there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts(Hardware):
    name: str
    hostname: str
    boot_id: str
    """The same on two nodes that are one machine."""
    links: tuple[NVLinks, ...] | Absent
    own_addresses: tuple[str, ...] | Absent
    """Addresses that the node's host name resolves to there."""
    torch_gpus: int
    libcuda: int | None
    """Major version of CUDA that the libcuda found here runs, which may not be the driver's own; None: there is none."""
    open_files: tuple[int, int]
    """ulimit -n, soft and hard; -1: unlimited."""
    locked_bytes: int
    """ulimit -l in bytes, or -1."""
    locks_any_memory: bool
    """The process has CAP_IPC_LOCK, so that the kernel does not heed ulimit -l (capabilities(7))."""
    disks: tuple[Disk, ...]
    ram_bytes: int
    free_ram_bytes: int
    versions: Mapping[str, str | Absent]
    engines: Mapping[str, Mapping[str, str] | Absent]
    ray_processes: tuple[str, ...]
    """Processes of a Ray that this process is no part of: "raylet 1234 of user"."""
    gloo_interface: str
    """Over which ranks on this node would meet; empty: where its host name leads."""
    settings: tuple[Setting, ...]
    """Network variables that train ranks on this node would get."""


def gather(name: str, expected: Expectations, *, reached_at: str | None) -> NodeFacts:
    """Facts of the node that this process runs on, which calls it `name`. Raises ConfigError for a network.interface that it does not
    have."""
    import torch

    hardware = find_hardware()
    memory = psutil.virtual_memory()
    files = read_nccl_files(os.environ)
    settings = network_settings(
        hardware, expected.network, "train", reached_at=reached_at, environment=os.environ, files=files, deepep=expected.deepep
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeFacts(
        **{field.name: getattr(hardware, field.name) for field in fields(hardware)},
        name=name,
        hostname=socket.gethostname(),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        links=find_links(),
        own_addresses=_own_addresses(),
        torch_gpus=torch.cuda.device_count(),
        libcuda=libcuda_version(),
        open_files=(soft, hard),
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        locks_any_memory=locks_any_memory(Path("/proc/self/status").read_text()),
        disks=(_disk("run folder", expected.run_dir), _disk("temp", Path(tempfile.gettempdir())), _disk("/dev/shm", Path("/dev/shm"))),
        ram_bytes=memory.total,
        free_ram_bytes=memory.available,
        versions=trainer_versions(),
        engines={
            engine: engine_versions(python, (engine, "torch", "transformers", TRANSFORMER_ENGINE))
            for engine, python in expected.engines.items()
        },
        ray_processes=tuple(_other_ray()),
        gloo_interface={**os.environ, **variables(settings)}.get("GLOO_SOCKET_IFNAME", ""),
        settings=settings,
    )


def locks_any_memory(status: str) -> bool:
    """Reading of /proc/PID/status: whether its effective capabilities have CAP_IPC_LOCK."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, flags=re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> _CAP_IPC_LOCK & 1)


def _own_addresses() -> tuple[str, ...] | Absent:
    name = socket.gethostname()
    try:
        return tuple(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None)))
    except OSError as error:
        return Absent(reason=f"{name}: {error}", is_fault=True)


def _disk(purpose: str, path: Path) -> Disk:
    """Disk of a folder that is not there yet: of the one in which it would be made."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    usage = shutil.disk_usage(there)
    refusal = ""
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"moerl")
    except OSError as error:
        refusal = f"{there}: {error.strerror}"
    return Disk(purpose=purpose, path=str(path), total_bytes=usage.total, free_bytes=usage.free, refusal=refusal)


def _other_ray() -> list[str]:
    """Raylet of no cluster that this process belongs to: neither one that started it nor the one of RAY_ADDRESS."""
    own = {name for parent in psutil.Process().parents() for name in _SESSION.findall(" ".join(parent.cmdline()))}
    address = os.environ.get("RAY_ADDRESS", "")
    found = []
    for process in psutil.process_iter(["name", "username", "cmdline"]):
        words = process.info["cmdline"]
        if process.info["name"] not in ("raylet", "gcs_server") or not words:
            continue
        if own.isdisjoint(_SESSION.findall(" ".join(words))) and not (address and f"--gcs-address={address}" in words):
            found.append(f"{process.info['name']} {process.pid} of {process.info['username']}")
    return found
