"""Rail of each GPU of a node: the number of the network card that its bytes take, among the cards of the compute network.

A fabric that is built by rails has the first card of every node on one leaf switch, the second on another: what stays on a rail crosses no
spine. Nothing on a node says whether its fabric is built so; where it is not, a rail is as good as any other choice.
"""

import re
from collections.abc import Mapping

from moerl.hardware.hardware_tools import Absent
from moerl.hardware.infiniband import Port, find_ports
from moerl.hardware.network_settings import fabric_ports
from moerl.hardware.nvidia import DISTANCES, Topology, find_topology

Rails = Mapping[str, int]
"""By GPU, as CUDA_VISIBLE_DEVICES numbers them."""


def find_rails() -> Rails | Absent:
    """Rails of this node."""
    return rails_of(find_topology(), find_ports())


def cards(ports: tuple[Port, ...] | Absent, topology: Topology | Absent) -> list[str]:
    """Adapters of the compute network in the order of their numbers: by name, mlx5_2 before mlx5_10."""
    names = {port.adapter for port in fabric_ports(ports, topology)}
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def rails_of(topology: Topology | Absent, ports: tuple[Port, ...] | Absent) -> Rails | Absent:
    """The card that NCCL takes first for each GPU (ncclTopoGetLocalNetType, src/graph/topo.cc of NCCL 2.30.7): of the nearest ones, where
    several GPUs have the same, one after the other in mirrored order."""
    if isinstance(topology, Absent):
        return topology
    if isinstance(ports, Absent):
        return ports
    names = cards(ports, topology)
    if not names:
        return Absent(reason="no active InfiniBand port carries the compute network")
    found = {}
    for gpu in topology.gpus:
        near = _nearest(topology.between[gpu], names)
        if not near:
            return Absent(reason=f"nvidia-smi topo tells no distance between {gpu} and a card")
        sharing = _nearest({other: topology.between[other].get(near[0], "") for other in topology.gpus}, topology.gpus)
        index = int(gpu.removeprefix("GPU"))
        found[str(index)] = names.index(near[_mirrored(index % len(sharing), len(near)) % len(near)])
    return found


def _nearest(distances: Mapping[str, str], names: list[str]) -> list[str]:
    """Those of `names` that none is nearer than; none where no distance is known."""
    known = {name: DISTANCES.index(distances[name]) for name in names if distances.get(name) in DISTANCES}
    least = min(known.values(), default=None)
    return [name for name, distance in known.items() if distance == least]


def _mirrored(number: int, count: int) -> int:
    """`number` with its bits in reverse order, for a `count` that is a power of two; else as it is (mirrorBits there)."""
    if count & (count - 1):
        return number
    width = count.bit_length() - 1
    return sum(1 << (width - 1 - bit) for bit in range(width) if number >> bit & 1)
