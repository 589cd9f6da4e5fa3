"""Who sends what to whom in a push: from the trainer's layout, the rollout's and the model's tensors, before anything runs.

    trainer rank --network--> one GPU of every node that reads the tensor --NVLink--> the other readers of that node

Experts go from their owner to the GPUs that serve them and to no other. Nothing crosses the network to a node twice. What every GPU of a
rollout holds (attention, norms, embeddings) is cut into parts that are spread over the node's GPUs, as each has a network card of its
own. Among ranks that hold the same the one that has sent least sends. Pure: integers in, integers out.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from moerl.config.layout import Layout
from moerl.convert.fp8 import BLOCK
from moerl.push_types import TensorSpec
from moerl.weights.spec import num_bytes, torch_dtype

PART_BYTES = 32 * 2**20
"""Of tensors that every GPU reads: a hundred parts and more for each GPU of a node in the largest models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One Hugging Face tensor as it travels, or one expert's part of a stack, and where the trainer has it."""

    spec: TensorSpec
    stage: int
    """Pipeline stage that holds it."""
    expert: int | None
    """None: not of an expert, so on every expert-parallel rank of the stage."""
    cut_dim: int | None
    """The axis that (expert) tensor parallelism cuts into nearly equal shares, 0 or 1; None: every one of these ranks has the whole."""
    scales_of: str | None = None
    """Name of the tensor in blocks of FP8 whose scales these are; their pieces travel with those of its values."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLayout:
    """Rollout servers of equal shape: experts are spread over the GPUs of a server, and all else is on each of them."""

    num_servers: int
    gpus_per_server: int
    gpus_per_node: int
    expert_parallel: int | None = None
    """GPUs of a server over which the experts are spread, or groups of GPUs that share them; None: all."""
    node_of: tuple[int, ...] | None = None
    """Of every GPU; None: `gpus_per_node` are on each, in order."""

    @property
    def expert_shares(self) -> int:
        return self.gpus_per_server if self.expert_parallel is None else self.expert_parallel

    @property
    def num_gpus(self) -> int:
        return self.num_servers * self.gpus_per_server

    @property
    def num_nodes(self) -> int:
        return len(np.unique(self.node_numbers()))

    def node_numbers(self) -> np.ndarray:
        """int [GPUs]"""
        return np.arange(self.num_gpus) // self.gpus_per_node if self.node_of is None else np.array(self.node_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Columns of equal length. `target` is a GPU of the rollout; so is `source` within a node, and over the network it is a trainer rank.

    `part` numbers the parts of a tensor, which are disjoint and make it up; their sizes are in `Plan.parts`.
    """

    source: np.ndarray  # int32
    target: np.ndarray  # int32
    part: np.ndarray  # int32, row of Plan.parts

    def __len__(self) -> int:
        return len(self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Columns: of every part its tensor, its shard among tensor-parallel ranks, its box in the tensor, and its bytes."""

    tensor: np.ndarray  # int32, index into Plan.tensors
    shard: np.ndarray  # int32; 0 for a tensor that is not cut
    start: np.ndarray  # int64 [parts, 2], of the first two axes of the tensor; 0 where it has fewer
    size: np.ndarray  # int64 [parts, 2]; 1 where it has fewer
    num_bytes: np.ndarray  # int64
    follows: np.ndarray  # bool: scales, which travel with the part before them: its values

    def unit_bytes(self) -> np.ndarray:
        """int64 [parts]: of each with the scales that follow it."""
        return self.num_bytes + np.append(np.where(self.follows, self.num_bytes, 0)[1:], 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    tensors: tuple[PlannedTensor, ...]
    parts: Parts
    network: Transfers
    spread: Transfers
    """Within nodes, of what arrived over the network."""
    layout: Layout
    rollout: RolloutLayout

    def box(self, part: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where a part begins in its tensor, and its shape."""
        shape = self.tensors[self.parts.tensor[part]].spec.shape
        rest = len(shape) - 2
        start, size = self.parts.start[part, : len(shape)].tolist(), self.parts.size[part, : len(shape)].tolist()
        return (*start, *(0,) * rest), (*size, *shape[2:])

    def received(self) -> np.ndarray:
        """int64 [GPUs of the rollout]: bytes over the network."""
        return _sum_by(self.network.target, self.parts.num_bytes[self.network.part], self.rollout.num_gpus)

    def sent(self) -> np.ndarray:
        """int64 [trainer ranks]: bytes over the network."""
        return _sum_by(self.network.source, self.parts.num_bytes[self.network.part], self.layout.ranks)

    def spread_in_node(self) -> np.ndarray:
        """int64 [GPUs of the rollout]: bytes from GPUs of the same node."""
        return _sum_by(self.spread.target, self.parts.num_bytes[self.spread.part], self.rollout.num_gpus)


def plan_transfers(tensors: Sequence[PlannedTensor], layout: Layout, rollout: RolloutLayout, *, num_experts: int, part_bytes: int) -> Plan:
    """`part_bytes`: largest part, of one row at least, of a tensor that every GPU reads; smaller parts spread a node's load more evenly.

    `layout` must be without problems, and `num_experts` a multiple of rollout.expert_shares. The order of `tensors` does not matter.
    """
    tensors = sorted(tensors, key=lambda tensor: tensor.name)
    parts = _parts(tensors, layout, part_bytes)
    sizes = parts.unit_bytes()
    loads = _Loads(layout.ranks, rollout.num_gpus)
    is_expert = np.array([tensor.expert is not None for tensor in tensors])
    leading = np.flatnonzero(~parts.follows)
    chosen, others = leading[is_expert[parts.tensor[leading]]], leading[~is_expert[parts.tensor[leading]]]
    experts, shared = _plan_experts(tensors, parts, chosen, sizes, layout, rollout, num_experts, loads)
    dense, spread = _plan_dense(tensors, parts, others, sizes, layout, rollout, loads)
    network, within = (_with_followers(_transfers(rows), parts) for rows in ([*experts, *dense], [*spread, *shared]))
    return Plan(tensors=tuple(tensors), parts=parts, network=network, spread=within, layout=layout, rollout=rollout)


def holders(tensor: PlannedTensor, shard: int, layout: Layout, num_experts: int) -> range:
    """Trainer ranks that hold a shard, or the whole tensor if it is not cut; experts' tensors always are.

    Megatron's order: tp, cp, dp, pp; of experts etp, ep, edp, pp (core/parallel_state.py).
    """
    per_stage = layout.ranks // layout.pp
    start = tensor.stage * per_stage
    if tensor.expert is None:
        return range(start, start + per_stage) if tensor.cut_dim is None else range(start + shard, start + per_stage, layout.tp)
    place = tensor.expert // (num_experts // layout.ep)
    return range(start + place * layout.etp + shard, start + per_stage, layout.ep * layout.etp)


def readers(tensor: PlannedTensor, rollout: RolloutLayout, num_experts: int) -> Sequence[int]:
    """GPUs of the rollout that must have the whole tensor."""
    if tensor.expert is None:
        return range(rollout.num_gpus)
    width = rollout.gpus_per_server // rollout.expert_shares
    first = tensor.expert // (num_experts // rollout.expert_shares) * width
    if width == 1:
        return range(first, rollout.num_gpus, rollout.gpus_per_server)
    return [server + gpu for server in range(0, rollout.num_gpus, rollout.gpus_per_server) for gpu in range(first, first + width)]


def faults(plan: Plan, num_experts: int) -> list[str]:
    """What is wrong with a plan, for people: a part that a reader lacks, gets twice, or that somebody sends without having it."""
    num_parts = len(plan.parts.tensor)
    arrivals = [plan.network.target.astype(np.int64) * num_parts + plan.network.part]
    arrivals.append(plan.spread.target.astype(np.int64) * num_parts + plan.spread.part)
    found, counts = _counted(np.concatenate(arrivals))
    wanted = _wanted(plan, num_experts)
    relayed = plan.spread.source.astype(np.int64) * num_parts + plan.spread.part
    nodes = plan.rollout.node_numbers()
    is_across = nodes[plan.spread.source] != nodes[plan.spread.target]
    checks = {
        "arrive more than once": found[counts > 1],
        "never arrive": _without(wanted, found),
        "arrive where nobody reads them": _without(found, wanted),
        "are passed on to another node": relayed[is_across],
        "are passed on by a GPU that did not get them over the network": _without(relayed, arrivals[0]),
    }
    named = [f"{len(keys)} parts {what}: {_name(plan, keys[0])}" for what, keys in checks.items() if len(keys)]
    return named + _wrong_senders(plan, num_experts)


def _counted(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every key once, in order, and how often it occurs."""
    keys = np.sort(keys)
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[first], np.diff(np.append(first, len(keys)))


def _without(keys: np.ndarray, others: np.ndarray) -> np.ndarray:
    # Sorting: the hash table that numpy would choose takes ten times as long for these numbers.
    return keys[~np.isin(keys, others, kind="sort")]


def _wanted(plan: Plan, num_experts: int) -> np.ndarray:
    """Reader and part as one number, for every part that a reader must get."""
    num_parts = len(plan.parts.tensor)
    experts_of_tensors = np.array([-1 if tensor.expert is None else tensor.expert for tensor in plan.tensors])
    experts = experts_of_tensors[plan.parts.tensor]
    keys = []
    for expert in np.unique(experts):
        parts = np.flatnonzero(experts == expert)
        gpus = readers(plan.tensors[plan.parts.tensor[parts[0]]], plan.rollout, num_experts)
        keys.append((np.array(gpus, dtype=np.int64)[:, None] * num_parts + parts).ravel())
    return np.concatenate(keys)


def _wrong_senders(plan: Plan, num_experts: int) -> list[str]:
    having = cache(lambda tensor, shard: holders(plan.tensors[tensor], shard, plan.layout, num_experts))
    pairs = np.unique(plan.network.part.astype(np.int64) * plan.layout.ranks + plan.network.source)
    parts, sources = np.divmod(pairs, plan.layout.ranks)
    rows = zip(plan.parts.tensor[parts].tolist(), plan.parts.shard[parts].tolist(), parts.tolist(), sources.tolist(), strict=True)
    wrong = [(part, source) for tensor, shard, part, source in rows if source not in having(tensor, shard)]
    if not wrong:
        return []
    return [f"{len(wrong)} parts are sent by a rank that does not hold them: {_part_name(plan, wrong[0][0])} by rank {wrong[0][1]}"]


def _name(plan: Plan, key: np.int64) -> str:
    gpu, part = divmod(int(key), len(plan.parts.tensor))
    return f"{_part_name(plan, part)} on GPU {gpu}"


def _part_name(plan: Plan, part: int) -> str:
    return f"part {part} ({plan.tensors[plan.parts.tensor[part]].name}, shard {plan.parts.shard[part]})"


# -- building --------------------------------------------------------------------------------------------------


class _Loads:
    """Bytes so far, by trainer rank and by GPU of the rollout."""

    def __init__(self, num_ranks: int, num_gpus: int):
        self.sent, self.received = [0] * num_ranks, [0] * num_gpus


Row = tuple[int, int, int]
"""source, target, part"""


def _parts(tensors: Sequence[PlannedTensor], layout: Layout, part_bytes: int) -> Parts:
    rows: list[tuple[int, ...]] = []
    scales = {tensor.scales_of: index for index, tensor in enumerate(tensors) if tensor.scales_of is not None}
    for index, tensor in enumerate(tensors):
        if tensor.scales_of is not None:
            continue
        num_shards = 1 if tensor.cut_dim is None else layout.tp if tensor.expert is None else layout.etp
        for shard in range(num_shards):
            for part in _parts_of(tensor, shard, num_shards, part_bytes):
                rows.append((index, shard, *part, 0))
                if (place := scales.get(tensor.name)) is not None and (box := _scales_part(part, tensors[place])) is not None:
                    rows.append((place, shard, *box, 1))
    columns = np.array(rows, dtype=np.int64).T
    tensor_index, shards = columns[:2].astype(np.int32)
    start, size, follows = columns[2:4].T, columns[4:6].T, columns[7].astype(bool)
    return Parts(tensor=tensor_index, shard=shards, start=start, size=size, num_bytes=columns[6], follows=follows)


_Box = tuple[int, int, int, int, int]
"""First row and column, numbers of rows and columns, bytes."""


def _scales_part(values: _Box, scales: PlannedTensor) -> _Box | None:
    """Of the blocks that begin in `values`; None: there are none."""
    row, column, num_rows, num_columns, _ = values
    first, left, stop, right = (-(-edge // BLOCK) for edge in (row, column, row + num_rows, column + num_columns))
    size = (stop - first) * (right - left)
    return (first, left, stop - first, right - left, size * torch_dtype(scales.spec).itemsize) if size else None


def _parts_of(tensor: PlannedTensor, shard: int, num_shards: int, part_bytes: int) -> Iterator[_Box]:
    """Of one shard, which is cut into parts by rows."""
    extents = (*tensor.spec.shape, 1, 1)[:2]
    bounds = [(0, extent) for extent in extents]
    if tensor.cut_dim is not None:
        bounds[tensor.cut_dim] = _shard(extents[tensor.cut_dim], num_shards, shard)
    (first, stop), (left, right) = bounds
    if first == stop and tensor.num_bytes:
        return  # the rows that padding added to a vocabulary, and no others
    row_bytes = tensor.num_bytes // max(prod(extents), 1) * (right - left)
    num_rows = stop - first
    num_parts = 1 if tensor.expert is not None else max(min(-(-num_rows * row_bytes // part_bytes), num_rows), 1)
    for part in range(num_parts):
        share = _share(num_rows, num_parts, part)
        yield first, left, share, right - left, share * row_bytes
        first += share


def _shard(size: int, count: int, index: int) -> tuple[int, int]:
    """Megatron's: all shards are equal, after padding that only the last ones have."""
    share = -(-size // count)
    return min(index * share, size), min((index + 1) * share, size)


def _share(total: int, count: int, index: int) -> int:
    """The first of `total` rows in `count` nearly equal shares have one more."""
    return total // count + (index < total % count)


def _plan_experts(
    tensors: Sequence[PlannedTensor],
    parts: Parts,
    chosen: np.ndarray,
    sizes: np.ndarray,
    layout: Layout,
    rollout: RolloutLayout,
    num_experts: int,
    loads: _Loads,
) -> tuple[list[Row], list[Row]]:
    """Over the network and within nodes: those that hold several copies of a server, or groups of GPUs that share experts."""
    network, shared = [], []
    nodes_of: dict[int | None, list[list[int]]] = {}
    for part in chosen.tolist():
        tensor, size = tensors[parts.tensor[part]], int(sizes[part])
        if (groups := nodes_of.get(tensor.expert)) is None:
            groups = nodes_of[tensor.expert] = _by_node(readers(tensor, rollout, num_experts), rollout)
        having = holders(tensor, int(parts.shard[part]), layout, num_experts)
        for group in groups:
            source, target = min(having, key=loads.sent.__getitem__), min(group, key=loads.received.__getitem__)
            loads.sent[source] += size
            loads.received[target] += size
            network.append((source, target, part))
            shared += [(target, gpu, part) for gpu in group if gpu != target]
    return network, shared


def _by_node(gpus: Sequence[int], rollout: RolloutLayout) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for gpu, node in zip(gpus, rollout.node_numbers()[gpus].tolist(), strict=True):
        found.setdefault(node, []).append(gpu)
    return list(found.values())


def _plan_dense(
    tensors: Sequence[PlannedTensor],
    parts: Parts,
    chosen: np.ndarray,
    sizes: np.ndarray,
    layout: Layout,
    rollout: RolloutLayout,
    loads: _Loads,
) -> tuple[list[Row], list[Row]]:
    """Over the network and within nodes. The largest parts first, so that the small ones even out the load."""
    order = chosen[np.argsort(-sizes[chosen], kind="stable")].tolist()
    senders = {part: list(holders(tensors[parts.tensor[part]], int(parts.shard[part]), layout, 0)) for part in order}
    network, spread = [], []
    for gpus in _by_node(range(rollout.num_gpus), rollout):
        queue = [(loads.received[gpu], gpu) for gpu in gpus]
        heapq.heapify(queue)
        for part in order:
            size = int(sizes[part])
            received, target = heapq.heappop(queue)
            heapq.heappush(queue, (received + size, target))
            source = min(senders[part], key=loads.sent.__getitem__)
            loads.sent[source] += size
            loads.received[target] += size
            network.append((source, target, part))
            spread += [(target, gpu, part) for gpu in gpus if gpu != target]
    return network, spread


def _transfers(rows: Iterable[Row]) -> Transfers:
    columns = np.array(list(rows), dtype=np.int32).reshape(-1, 3).T
    return Transfers(source=columns[0], target=columns[1], part=columns[2])


def _with_followers(transfers: Transfers, parts: Parts) -> Transfers:
    """The same with the scales of what is transferred."""
    has_scales = np.append(parts.follows[1:], False)[transfers.part]
    source, target, part = (np.concatenate([column, column[has_scales]]) for column in (transfers.source, transfers.target, transfers.part))
    part[len(transfers) :] += 1
    return Transfers(source=source, target=target, part=part)


def _sum_by(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    total = np.zeros(size, dtype=np.int64)
    np.add.at(total, index, values)
    return total
