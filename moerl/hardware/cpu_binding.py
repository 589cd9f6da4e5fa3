"""The CPUs near a GPU, for the rank that uses it: page-locked memory and threads on the other socket cross the link between the two."""

import os
from collections.abc import Sequence

from moerl.hardware.hardware_tools import Absent
from moerl.hardware.nvidia import Topology, find_topology


def bind_near(gpus: Sequence[str]) -> str:
    """Let this thread, and those it will start, run on the CPUs near these GPUs alone. Returns what was done, or why nothing was, as
    text."""
    cpus = near(find_topology(), gpus, allowed=os.sched_getaffinity(0))
    if isinstance(cpus, str):
        return f"runs on any CPU: {cpus}"
    os.sched_setaffinity(0, cpus)
    return f"runs on {len(cpus)} CPUs near its GPU, from {min(cpus)} to {max(cpus)}"


def near(topology: Topology | Absent, gpus: Sequence[str], *, allowed: set[int]) -> set[int] | str:
    """CPUs near these GPUs, of those `allowed`; or why there are none, as text. `gpus`: as CUDA_VISIBLE_DEVICES has them."""
    if isinstance(topology, Absent):
        return topology.reason
    if not gpus or not all(gpu.isdigit() for gpu in gpus):
        return "its GPU is not known by a number"
    found: set[int] = set()
    for gpu in gpus:
        if not (cpus := topology.cpus.get(f"GPU{gpu}")):
            return f"nvidia-smi topo names no CPU for GPU {gpu}"
        found |= cpus
    return found & allowed or "those near its GPU are not this process's to use"
