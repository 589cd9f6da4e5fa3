"""The plan that a run executes: from what the trainer says it holds and the rollout servers say they need. Pure.

Deliveries of a push: which rank sends which bucket to whom. It is the plan that `moerl plan` prints for the same layouts; what it assumes
of a server's processes is compared with what they say.
"""

import gc
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, cycle

from moerl.config.schema.layout import Layout
from moerl.types.errors import WeightError
from moerl.types.push import Needs
from moerl.weights.plan.buckets import Deliveries, deliveries, restricted
from moerl.weights.plan.plan_faults import faults, misread
from moerl.weights.plan.senders import plan_transfers
from moerl.weights.plan.tensor_specs import expert_of
from moerl.weights.plan.transfer_plan import PART_BYTES, PlannedTensor, Rails, Relays, RolloutLayout, TransferPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Tensors that a trainer has to push."""

    tensors: Sequence[PlannedTensor]
    layout: Layout
    bucket_bytes: int

    @property
    def num_experts(self) -> int:
        """0: none."""
        return 1 + max((tensor.expert for tensor in self.tensors if tensor.expert is not None), default=-1)


Nodes = Mapping[str, Sequence[str]]
"""By server: the nodes over which its model processes are spread, equally and in order. Any names, the same for the same node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlaces:
    """Nodes and GPUs of the trainer's ranks, which relay to servers on them. All GPUs are counted within their node."""

    nodes: Sequence[str]
    """Node of every rank; names as in Nodes."""
    gpus: Sequence[int]
    """GPU of every rank."""
    server_gpus: Mapping[str, Sequence[int]]
    """By server, of every model process, if each has one."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Context without Python's search for cycles: a plan is millions of objects without one, and the search takes a fourth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@without_collections()
def plan_deliveries(
    outline: Outline, needs: Mapping[str, Needs], nodes: Nodes | None = None, ranks: RankPlaces | None = None, rails: Rails | None = None
) -> Deliveries:
    """`needs`: of every server, by the name errors use. `nodes`: None if every process reads where the senders write. `ranks`: if they
    relay. `rails`: of all processes, in the order of `needs`.

    WeightError if the plan has a fault or is not what the servers need.
    """
    plan = plan_of_run(outline, needs, nodes, ranks, rails)
    if wrong := [*misread(plan, outline.num_experts, needs), *faults(plan, outline.num_experts)]:
        raise WeightError(f"the plan of the push is wrong, nothing was sent: {'; '.join(wrong)}")
    return deliveries(plan, bucket_bytes=outline.bucket_bytes, by_node=nodes is not None)


def plan_of_run(
    outline: Outline, needs: Mapping[str, Needs], nodes: Nodes | None = None, ranks: RankPlaces | None = None, rails: Rails | None = None
) -> TransferPlan:
    return plan_transfers(
        outline.tensors,
        outline.layout,
        _rollout(outline.num_experts, needs, nodes),
        num_experts=outline.num_experts,
        part_bytes=part_bytes(outline.bucket_bytes),
        relays=None if ranks is None or nodes is None else _relays(ranks, needs, nodes),
        rails=rails,
    )


def _relays(ranks: RankPlaces, needs: Mapping[str, Needs], nodes: Nodes) -> Relays:
    places: list[tuple[str, int | None]] = []
    for server, processes in needs.items():
        gpus: Sequence[int | None] = ranks.server_gpus[server]
        if len(gpus) != len(processes):  # an engine that computes on CPU
            gpus = (None,) * len(processes)
        places += zip(_each_node(nodes[server], len(processes)), gpus, strict=True)
    return relays_of(list(zip(ranks.nodes, ranks.gpus, strict=True)), places)


def relays_of(ranks: Sequence[tuple[Hashable, int]], processes: Sequence[tuple[Hashable, int | None]]) -> Relays:
    """Node and GPU of every rank, and of every model process of the servers in order; a GPU is counted within its node. A process without
    one, or on one without a rank, gets a rank of its node in turn. WeightError where a node has none."""
    numbers = numbered(node for node, _ in processes)
    at = {place: rank for rank, place in enumerate(ranks)}
    on_node: dict[Hashable, list[int]] = defaultdict(list)
    for rank, (node, _) in enumerate(ranks):
        on_node[node].append(rank)
    if alone := [node for node in numbers if node not in on_node]:
        raise WeightError(f"servers on {alone[0]!r} have no rank of the trainer on their node that could relay to them")
    turns = {node: cycle(members) for node, members in on_node.items()}
    of_gpu = tuple(at[place] if place in at else next(turns[place[0]]) for place in processes)
    return Relays(node_of_rank=tuple(numbers.get(node, -1) for node, _ in ranks), of_gpu=of_gpu)


def numbered(nodes: Iterable[Hashable]) -> dict[Hashable, int]:
    """Number of every node of a rollout, of the nodes of its model processes in order: by this RolloutLayout.node_of and Relays agree."""
    return {node: number for number, node in enumerate(dict.fromkeys(nodes))}


def part_bytes(bucket_bytes: int) -> int:
    """A large tensor is cut, so that it fits into a bucket."""
    return min(PART_BYTES, bucket_bytes)


def _rollout(num_experts: int, needs: Mapping[str, Needs], nodes: Nodes | None) -> RolloutLayout:
    sizes = {name: len(processes) for name, processes in needs.items()}
    if len(set(sizes.values())) != 1:
        rule = f"servers of one rollout must have equally many model processes, and have {sizes}"
        raise WeightError(f"{rule}; give all the same engine arguments")
    (size,) = set(sizes.values())
    shares = max(len({_experts(names) for names in processes}) for processes in needs.values())
    if num_experts and (num_experts % shares or size % shares):
        rule = f"{num_experts} experts on {size} processes of a server in {shares} different shares"
        raise WeightError(f"{rule}: shares must be equal; balance experts with whole copies of a server, not within one")
    on = [] if nodes is None else [node for name in needs for node in _each_node(nodes[name], size)]
    node_of = tuple(map(numbered(on).__getitem__, on)) or None
    largest = size * len(needs) if node_of is None else max(Counter(node_of).values())
    return RolloutLayout(num_servers=len(needs), gpus_per_server=size, gpus_per_node=largest, expert_parallel=shares, node_of=node_of)


def _each_node(names: Sequence[str], size: int) -> list[str]:
    """Node of each of the `size` model processes of a server on these."""
    if size % len(names):
        raise WeightError(f"{size} model processes of a server on {len(names)} nodes: every node of a server must have equally many")
    return [names[process * len(names) // size] for process in range(size)]


def _experts(names: Sequence[str]) -> frozenset[str]:
    return frozenset(name for name in names if expert_of(name) is not None)


class KeptPlan:
    """Plan of a run's pushes, made once: it takes seconds of the driver for the largest models, and a server that ends or starts again
    changes nothing in it but who is there. It is for the most servers that have been there so far; that for some of them follows."""

    def __init__(self) -> None:
        self.outline: Outline | None = None
        """Outline of the trainer, asked for once; None: ask."""
        self._trainer: object = None
        self._servers: Mapping[str, tuple[Needs, object, object, object]] = {}
        """By name, in their order: their needs, nodes, GPUs and rails."""
        self._found: Deliveries | None = None

    def of(
        self, needs: Mapping[str, Needs], nodes: Nodes | None = None, ranks: RankPlaces | None = None, rails: Rails | None = None
    ) -> Deliveries:
        """As plan_deliveries, of the outline."""
        assert self.outline is not None, "it is asked for before"
        trainer = (self.outline, nodes is None, ranks and (ranks.nodes, ranks.gpus), rails and rails.senders)
        firsts = accumulate(map(len, needs.values()), initial=0)
        servers = {
            name: (
                processes,
                nodes and tuple(nodes[name]),
                ranks and tuple(ranks.server_gpus[name]),
                rails and rails.readers[first:][: len(processes)],
            )
            for first, (name, processes) in zip(firsts, needs.items(), strict=False)
        }
        is_part = servers.items() <= self._servers.items() and [name for name in self._servers if name in servers] == list(servers)
        if self._found is None or not is_part or trainer != self._trainer:
            self._found = plan_deliveries(self.outline, needs, nodes, ranks, rails)
            self._trainer, self._servers = trainer, servers
        if len(servers) == len(self._servers):
            return self._found
        owners = [name for name, (processes, *_) in self._servers.items() for _ in processes]
        there = [number for number, name in enumerate(owners) if name in servers]
        return restricted(self._found, {before: number for number, before in enumerate(there)})
