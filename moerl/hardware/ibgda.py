"""Sends that a GPU gives to its RDMA adapter itself (IBGDA), which DeepEP asks of NVSHMEM between nodes: variables, and what it needs.

Held against NVSHMEM (src/modules/transport/ibgda/ibgda.cpp, src/host/transport/transport.cpp), whose 3.4.5 is in every lock, and against
DeepEP 29d31c0 (deep_ep/buffer.py, third-party/README.md), which sets NVSHMEM_IB_ENABLE_IBGDA, queue pairs and their depth itself, over what
is there.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moerl.hardware.infiniband import Port


@dataclass(frozen=True, kw_only=True, slots=True)
class Doorbell:
    """By what an adapter may hear of work that a GPU has for it."""

    maps_peers: bool
    """The driver was loaded with PeerMappingOverride=1, so that GPUs can map the adapter's registers."""
    has_gdrdrv: bool
    """GDRCopy's kernel module is loaded: a thread of the CPU sees the GPU's words, and rings."""


def find_doorbell(root: Path = Path("/")) -> Doorbell:
    """`root`: of the file system, for tests. The module's parameter in /sys is empty though it is set."""
    try:
        options = (root / "proc/driver/nvidia/params").read_text()
    except OSError:
        options = ""
    words = next((line for line in options.splitlines() if line.startswith("RegistryDwords:")), "")
    has_gdrdrv = (root / "dev/gdrdrv").exists()
    return Doorbell(maps_peers="PeerMappingOverride=1" in words.replace(" ", ""), has_gdrdrv=has_gdrdrv)


def handler_reason(doorbell: Doorbell) -> str:
    """Outcome of NVSHMEM_IBGDA_NIC_HANDLER=auto, which tries."""
    if doorbell.maps_peers:
        return "PeerMappingOverride=1: GPUs ring the adapter's doorbell"
    by = "GDRCopy" if doorbell.has_gdrdrv else "host memory, as GDRCopy's gdrdrv is not loaded either"
    return f"no PeerMappingOverride=1: unless the driver maps the doorbell all the same, a thread of the CPU rings it by way of {by}"


def prefix_of(ports: Sequence[Port]) -> str | None:
    """NVSHMEM_HCA_PREFIX: NVSHMEM leaves out adapters whose names have it nowhere, mlx5 if nothing is set. None: not needed, or the
    names have no letters in common."""
    if all("mlx5" in port.adapter for port in ports):
        return None
    letters = {re.split("[^a-z]", port.adapter)[0] for port in ports} - {""}
    return letters.pop() if len(letters) == 1 else None
