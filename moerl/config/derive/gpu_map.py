"""GPU of each training rank and rollout server: a function of layout, servers and nodes, without Ray."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from moerl.config.derive.companion_models import own_layouts
from moerl.config.schema.layout import Layout
from moerl.types.errors import ConfigError, Problem, problem

if TYPE_CHECKING:
    from moerl.config.schema.rollout_config import RolloutConfig
    from moerl.config.schema.run_config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MappedGPU:
    node: int
    index: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    num_nodes: int
    gpus_per_node: int
    nodes_per_domain: int = 1
    """Joined by NVLink."""

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def gpus(self) -> list[MappedGPU]:
        return [MappedGPU(node=node, index=index) for node in range(self.num_nodes) for index in range(self.gpus_per_node)]


@dataclass(frozen=True, kw_only=True)
class ServerShape:
    num_servers: int
    gpus_per_server: int
    """0: they need none."""
    num_shared: int
    """The first so many are on GPUs of the trainer."""


@dataclass(frozen=True, kw_only=True)
class GPUMap:
    ranks: tuple[MappedGPU, ...]
    """GPU of each rank."""
    servers: tuple[tuple[MappedGPU, ...], ...]
    """GPUs of each server, in order; empty for one that needs none."""
    beside: Mapping[str, tuple[MappedGPU, ...]] = field(default_factory=dict)
    """GPU of each rank of models beside the policy that have their own, by name."""


def map_gpus(layout: Layout, servers: ServerShape, machine: Machine, beside: Mapping[str, Layout] = MappingProxyType({})) -> GPUMap:
    """`layout` without problems of its own. `beside`: of models with ranks of their own. ConfigError with what does not fit, and what
    would."""
    if shortage := list(_shortage(layout, servers, machine, beside)):
        raise ConfigError(shortage)
    reason = ""
    for mapped in _rank_gpus(layout, machine, frozenset()):
        others: dict[str, tuple[MappedGPU, ...]] = {}
        for name, other in beside.items():
            taken = frozenset(mapped).union(*others.values())
            found = next(_rank_gpus(other, machine, taken), None)
            if found is None:
                reason = f"no room for {name}.layout, whose groups of {other.tp} ranks stay inside a node"
                break
            others[name] = found
        else:
            reason, placed = _place_servers(servers, mapped, machine, frozenset().union(*others.values()))
            if not reason:
                return GPUMap(ranks=mapped, servers=placed, beside=others)
    if reason:
        fix = "more placement.nodes, fewer servers, or servers of a number of GPUs that divides a node's, or is a multiple of it"
        raise ConfigError([problem("rollout.num_servers", servers.num_servers, "servers cannot be placed", reason, fix)])
    rule = f"must leave room for groups of {layout.tp} on nodes of {machine.gpus_per_node} GPUs"
    reason = f"a tensor-parallel group exchanges activations in every layer and stays inside a node; {machine.num_nodes} nodes are too few"
    fix = f"a tp that divides {machine.gpus_per_node}, or more placement.nodes"
    raise ConfigError([problem("train.layout.tp", layout.tp, rule, reason, fix)])


def _rank_gpus(layout: Layout, machine: Machine, taken: frozenset[MappedGPU]) -> Iterator[tuple[MappedGPU, ...]]:
    """GPU of each rank, with as much kept together as there is room for first; none of those `taken`."""
    for block in _blocks(layout, machine):
        room = _in_blocks(block, machine)
        blocks = [room[begin : begin + block] for begin in range(0, len(room), block)]
        free = [gpu for gpus in blocks if taken.isdisjoint(gpus) for gpu in gpus] if taken else room
        if len(free) >= layout.ranks:
            ranks = dict(zip(rank_order(layout), free, strict=False))
            yield tuple(ranks[rank] for rank in range(layout.ranks))


def rank_order(layout: Layout) -> list[int]:
    """Ranks in the order of the GPUs they get. Megatron numbers tensor, context, data and pipeline parallel ranks in this order."""
    stage, unit = layout.ranks // layout.pp, _unit(layout)
    return [
        number * stage + replica * unit + member
        for replica in range(stage // unit)
        for number in range(layout.pp)
        for member in range(unit)
    ]


def _unit(layout: Layout) -> int:
    return math.lcm(layout.tp * layout.cp, layout.ep * layout.etp)


def _blocks(layout: Layout, machine: Machine) -> Iterator[int]:
    """Numbers of ranks that may be kept together, the best first; 1 if even a tensor-parallel group is larger than a domain."""
    domain = machine.gpus_per_node * machine.nodes_per_domain
    wanted = sorted({_unit(layout), layout.ep * layout.etp, layout.tp * layout.cp, layout.tp}, reverse=True)
    fitting = [size for size in wanted if layout.tp <= size <= domain]
    yield from fitting if fitting else [1]


def _in_blocks(block: int, machine: Machine) -> list[MappedGPU]:
    """All GPUs but those at the end of a node, or domain, that do not make a block."""
    nodes = 1 if block <= machine.gpus_per_node else machine.nodes_per_domain
    size = nodes * machine.gpus_per_node
    gpus = machine.gpus
    rooms = [gpus[begin : begin + size] for begin in range(0, machine.num_gpus, size)]
    return [gpu for room in rooms for gpu in room[: len(room) // block * block]]


def _place_servers(
    servers: ServerShape, ranks: Sequence[MappedGPU], machine: Machine, others: frozenset[MappedGPU]
) -> tuple[str, tuple[tuple[MappedGPU, ...], ...]]:
    """(why not, the GPUs of every server). `others`: of models beside the policy."""
    if servers.gpus_per_server == 0:
        return "", ((),) * servers.num_servers
    taken = set(ranks)
    placed: list[tuple[MappedGPU, ...]] = []
    for count, free, whose in (
        (servers.num_shared, sorted(taken), "the trainer's"),
        (servers.num_servers - servers.num_shared, [gpu for gpu in machine.gpus if gpu not in taken and gpu not in others], "the others"),
    ):
        found = _server_gpus(servers.gpus_per_server, free, machine)
        if len(found) < count:
            return f"of {whose} {len(free)} GPUs, {len(found)} servers of {servers.gpus_per_server} can be made inside nodes", ()
        placed += found[:count]
    return "", tuple(placed)


def _server_gpus(num_gpus: int, free: Sequence[MappedGPU], machine: Machine) -> list[tuple[MappedGPU, ...]]:
    """As many servers as `free` has room for: inside a node, or of whole nodes that follow each other, inside a domain if they fit."""
    by_node: list[list[MappedGPU]] = [[] for _ in range(machine.num_nodes)]
    for gpu in free:
        by_node[gpu.node].append(gpu)
    if num_gpus <= machine.gpus_per_node:
        return [tuple(node[begin : begin + num_gpus]) for node in by_node for begin in range(0, len(node) // num_gpus * num_gpus, num_gpus)]
    if num_gpus % machine.gpus_per_node:
        return []
    count = num_gpus // machine.gpus_per_node
    step = machine.nodes_per_domain if count <= machine.nodes_per_domain else machine.num_nodes
    found: list[tuple[MappedGPU, ...]] = []
    for domain in range(0, machine.num_nodes, step):
        run: list[MappedGPU] = []
        for node in by_node[domain : domain + step]:
            run = run + node if len(node) == machine.gpus_per_node else []
            if len(run) == num_gpus:
                found.append(tuple(run))
                run = []
    return found


def _shortage(layout: Layout, servers: ServerShape, machine: Machine, beside: Mapping[str, Layout]) -> Iterator[Problem]:
    shared, own = servers.num_shared * servers.gpus_per_server, (servers.num_servers - servers.num_shared) * servers.gpus_per_server
    needed = layout.ranks + own + sum(other.ranks for other in beside.values())
    if needed > machine.num_gpus:
        nodes = -(-needed // machine.gpus_per_node)
        others = "".join(f", {other.ranks} of {name}" for name, other in beside.items())
        reason = f"{layout.ranks} training ranks{others} and servers on {own} GPUs of their own need {needed}; there are {machine.num_gpus}"
        fix = f"placement.nodes={nodes}, fewer train.layout.ranks, or fewer servers"
        rule = f"must be at least {nodes} with {machine.gpus_per_node} GPUs each"
        yield problem("placement.nodes", machine.num_nodes, rule, reason, fix)
    if shared > layout.ranks:
        reason = f"{servers.num_shared} servers of {servers.gpus_per_server} are on the trainer's GPUs, and it has {layout.ranks}"
        fix = f"at most {layout.ranks // servers.gpus_per_server} servers there, or placement.mode=separate"
        yield problem("rollout.num_servers", servers.num_servers, "must fit on the trainer's GPUs", reason, fix)


def gpus_per_server(rollout: "RolloutConfig") -> int:
    """Or processes, where there are no GPUs. The fake engine is part of the driver."""
    return 0 if rollout.traits.runs_in_driver else rollout.layout.gpus


def num_gpus(config: "RunConfig") -> int:
    """GPUs of the ranks and of the servers that do not share theirs; the hf server computes on CPU."""
    rollout = config.rollout
    per_server = rollout.layout.gpus if rollout.traits.has_environment else 0
    ranks = config.train.layout.ranks + sum(layout.ranks for layout in own_layouts(config).values())
    return ranks + (rollout.num_servers - num_shared(config)) * per_server


def num_shared(config: "RunConfig") -> int:
    """The first so many servers are on GPUs of the trainer."""
    shared = {"separate": 0, "colocated": config.rollout.num_servers, "group_colocated": config.placement.num_shared}
    count = shared[config.placement.mode]
    assert count is not None, "validated"
    return count


def gpu_map(config: "RunConfig") -> GPUMap:
    """ConfigError if there is no room."""
    placement, rollout = config.placement, config.rollout
    servers = ServerShape(num_servers=rollout.num_servers, gpus_per_server=gpus_per_server(rollout), num_shared=num_shared(config))
    gpus = placement.gpus_per_node
    if gpus is None:
        gpus = config.train.layout.ranks + (servers.num_servers - servers.num_shared) * servers.gpus_per_server
        gpus += sum(layout.ranks for layout in own_layouts(config).values())
    machine = Machine(num_nodes=placement.nodes, gpus_per_node=gpus, nodes_per_domain=placement.nodes_per_domain)
    return map_gpus(config.train.layout, servers, machine, own_layouts(config))


def relays_pushes(config: "RunConfig") -> bool:
    """Whether the trainer's ranks relay pushes to servers on their nodes, as a run then does (weights/sync.py, resolve_transport)."""
    mode, chosen = config.placement.mode, config.weights.transport
    if mode == "separate" or (chosen != "nccl" and (chosen != "auto" or config.placement.nodes == 1)):
        return False
    if mode == "colocated":
        return True
    mapped = gpu_map(config)
    return {gpu.node for server in mapped.servers for gpu in server} <= {gpu.node for gpu in mapped.ranks}
