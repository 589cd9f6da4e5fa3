"""Into which parts the tensors of a push are cut, which of them are wanted together, and which rank sends each to which GPUs. Pure.

A reader uses a tensor when it has all parts of it, and an engine that fuses the experts of a layer when it has all of these. It keeps them
until then. Hence batches: some tensors of a stage, or the experts of whole layers, which few ranks send to a node at about one time.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod

import numpy as np

from moerl.config.schema.layout import Layout
from moerl.models.fp8_names import BLOCK
from moerl.weights.plan.card_loads import Cards
from moerl.weights.plan.tensor_specs import item_bytes
from moerl.weights.plan.transfer_plan import (
    Parts,
    PlannedTensor,
    Rails,
    Relays,
    RolloutLayout,
    TransferPlan,
    Transfers,
    holders,
    readers,
)  # fmt: skip

BATCH_PARTS = 16
"""A batch has as many bytes as so many of the largest parts: two of them for each GPU of a node of eight."""

SHARE_BYTES = 2**18
"""Smallest share of a GPU that is worth a part of its own: of smaller ones it compares the whole tensor."""
RAIL_PARTS = 4
"""Slack of a card for the sake of its rail, over the least busy one that would do, in largest parts: 128 MiB, 2.7 ms at
400 Gbit/s."""

_Box = tuple[int, int, int, int, int]
"""First row and column, numbers of rows and columns, bytes."""


def parts_of(tensors: Sequence[PlannedTensor], layout: Layout, rollout: RolloutLayout, *, part_bytes: int) -> Parts:
    """`part_bytes`: largest part, of one row at least, of a tensor that every GPU reads; experts are cut by tensor parallelism only.

    Tensor parallelism of a server cuts along the axis along which the trainer's does. So parts end where shares of a server's GPUs do, and
    a GPU compares those of its share with their digests, and no others.
    """
    rows: list[tuple[int, ...]] = []
    scales = {tensor.scales_of: index for index, tensor in enumerate(tensors) if tensor.scales_of is not None}
    batches = _batches(tensors, rollout, limit=BATCH_PARTS * part_bytes)
    for index, tensor in enumerate(tensors):
        if tensor.scales_of is not None:
            continue
        num_shards = 1 if tensor.cut_dim is None else layout.tp if tensor.expert is None else layout.etp
        num_shares = _num_shares(tensor, rollout)
        for shard in range(num_shards):
            for part in _parts_of(tensor, shard, num_shards, num_shares, part_bytes):
                rows.append((index, shard, *part, 0, batches[index]))
                if (place := scales.get(tensor.name)) is not None and (box := _scales_part(part, tensors[place])) is not None:
                    rows.append((place, shard, *box, 1, batches[index]))
    columns = np.array(rows, dtype=np.int64).T
    tensor_index, shards, batch = columns[[0, 1, 8]].astype(np.int32)
    start, size, follows = columns[2:4].T, columns[4:6].T, columns[7].astype(bool)
    return Parts(tensor=tensor_index, shard=shards, start=start, size=size, num_bytes=columns[6], follows=follows, batch=batch)


def _batches(tensors: Sequence[PlannedTensor], rollout: RolloutLayout, *, limit: int) -> list[int]:
    """Batch of every tensor; counted within its stage, of experts and of all else. `limit`: bytes for a GPU, one layer of experts at
    least."""
    last: dict[tuple[int, bool], tuple[int, int]] = {}
    units: dict[tuple[int, str], list[int]] = {}
    for index, tensor in enumerate(tensors):
        units.setdefault((tensor.stage, _unit(tensor)), []).append(index)
    found = [0] * len(tensors)
    for (stage, _), members in units.items():
        is_expert = tensors[members[0]].expert is not None
        size = sum(tensors[index].num_bytes for index in members) // (rollout.expert_shares if is_expert else 1)
        number, filled = last.get((stage, is_expert), (0, 0))
        if filled and filled + size > limit:
            number, filled = number + 1, 0
        last[stage, is_expert] = number, filled + size
        for index in members:
            found[index] = number
    return found


def _unit(tensor: PlannedTensor) -> str:
    """The same for the experts of a layer, and for values and their scales."""
    name = tensor.scales_of or tensor.name
    return name if tensor.expert is None else name.partition(".experts")[0]


def _scales_part(values: _Box, scales: PlannedTensor) -> _Box | None:
    """Part of the blocks that begin in `values`; None: there are none."""
    row, column, num_rows, num_columns, _ = values
    first, left, stop, right = (-(-edge // BLOCK) for edge in (row, column, row + num_rows, column + num_columns))
    size = (stop - first) * (right - left)
    return (first, left, stop - first, right - left, size * item_bytes(scales.spec)) if size else None


def _num_shares(tensor: PlannedTensor, rollout: RolloutLayout) -> int:
    """Shares of a server's GPUs in a tensor, if they cut it. Small ones are not worth parts of their own. Over several nodes a server has
    copies of what is no expert, or nearly always: a tensor-parallel group of data-parallel attention on each."""
    width = rollout.gpus_per_server if tensor.expert is None else rollout.gpus_per_server // rollout.expert_shares
    num_gpus = min(width, rollout.gpus_per_node)
    return num_gpus if tensor.cut_dim is not None and tensor.num_bytes >= num_gpus * SHARE_BYTES else 1


def _parts_of(tensor: PlannedTensor, shard: int, num_shards: int, num_shares: int, part_bytes: int) -> Iterator[_Box]:
    """Parts of one shard: what is of each share of a server's GPUs, cut by rows."""
    extents = (*tensor.spec.shape, 1, 1)[:2]
    element_bytes = tensor.num_bytes // max(prod(extents), 1)
    bounds = [(0, extent) for extent in extents]
    cut = 0 if tensor.cut_dim is None else tensor.cut_dim
    for share in range(num_shares):
        if tensor.cut_dim is not None:
            ranges = _shard(extents[cut], num_shards, shard), _shard(extents[cut], num_shares, share)
            bounds[cut] = max(first for first, _ in ranges), min(stop for _, stop in ranges)
        (first, stop), (left, right) = bounds
        if (first >= stop or left >= right) and tensor.num_bytes:
            continue  # another shard's share, or the rows that padding added to a vocabulary, and no others
        num_rows, row_bytes = stop - first, element_bytes * (right - left)
        num_parts = 1 if tensor.expert is not None else max(min(-(-num_rows * row_bytes // part_bytes), num_rows), 1)
        for part in range(num_parts):
            size = _share(num_rows, num_parts, part)
            yield first, left, size, right - left, size * row_bytes
            first += size


def _shard(size: int, count: int, index: int) -> tuple[int, int]:
    """Megatron's: all shards are equal, after padding that only the last ones have."""
    share = -(-size // count)
    return min(index * share, size), min((index + 1) * share, size)


def _share(total: int, count: int, index: int) -> int:
    """The first of `total` rows in `count` nearly equal shares have one more."""
    return total // count + (index < total % count)


_Rows = tuple[int, int, Sequence[int]]
"""source, target, parts"""


def plan_transfers(
    tensors: Sequence[PlannedTensor], layout: Layout, rollout: RolloutLayout, *, num_experts: int, part_bytes: int,
    relays: Relays | None = None, rails: Rails | None = None,
) -> TransferPlan:  # fmt: skip
    """`part_bytes`: largest part, of one row at least, of a tensor that every GPU reads; smaller parts spread a node's load more evenly.
    `relays`: of what ranks on a node hold, nothing is brought to it over the network. `rails`: sender and first reader are of one rail
    where that leaves cards about as even; None: any two will do.

    `layout` must be without problems, and `num_experts` a multiple of rollout.expert_shares. The order of `tensors` does not matter.
    """
    tensors = sorted(tensors, key=lambda tensor: tensor.name)
    parts = parts_of(tensors, layout, rollout, part_bytes=part_bytes)
    cards = Cards(layout, rollout, rails, slack=RAIL_PARTS * part_bytes)
    routes = _Routes(tensors, parts, layout, rollout, num_experts, relays, cards)
    for batch in _in_batches(tensors, parts, of_experts=True):
        routes.add_experts(batch)
    for batch in _in_batches(tensors, parts, of_experts=False):
        routes.add_others(batch)
    network, within = (_with_followers(_transfers(rows), parts) for rows in (routes.network, routes.within))
    return TransferPlan(tensors=tuple(tensors), parts=parts, network=network, spread=within, layout=layout, rollout=rollout, relays=relays)


class _Routes:
    def __init__(
        self, tensors: Sequence[PlannedTensor], parts: Parts, layout: Layout, rollout: RolloutLayout, num_experts: int,
        relays: Relays | None, cards: Cards,
    ):  # fmt: skip
        self._tensors, self._parts, self._sizes = tensors, parts, parts.unit_bytes().tolist()
        self._layout, self._rollout, self._num_experts = layout, rollout, num_experts
        self._cards, self._node_of = cards, rollout.node_numbers().tolist()
        self._nodes = self._by_node(range(rollout.num_gpus))
        self._rank_nodes = None if relays is None else relays.node_of_rank
        self._on_node: dict[tuple[range, int], Sequence[int]] = {}
        self._nodes_of: dict[int, list[list[int]]] = {}
        self.network: list[_Rows] = []
        self.within: list[_Rows] = []

    def add_experts(self, batch: Sequence[int]) -> None:
        """Within a node go those of which it holds copies: of several servers, or of groups of GPUs that share experts."""
        senders: dict[tuple[int, Sequence[int]], int] = {}
        for (share, having), parts in self._by_share(batch).items():
            for group in self._nodes_of[share]:
                near = self._near(having, group[0])
                for some in [parts] if len(group) == 1 else [[part] for part in parts]:
                    target = self._cards.target(group, near)
                    if (source := senders.get((target, near))) is None:
                        source = senders[target, near] = self._cards.source(near, target)
                    self._add(some, source, target, group)

    def _by_share(self, batch: Sequence[int]) -> dict[tuple[int, range], list[int]]:
        """By the share of the experts that GPUs of a server read, and the ranks that hold them."""
        found: dict[tuple[int, range], list[int]] = {}
        for part in batch:
            tensor = self._tensors[self._parts.tensor[part]]
            assert tensor.expert is not None
            share = tensor.expert * self._rollout.expert_shares // self._num_experts
            if share not in self._nodes_of:
                self._nodes_of[share] = self._by_node(readers(tensor, self._rollout, self._num_experts))
            found.setdefault((share, self._having(part)), []).append(part)
        return found

    def add_others(self, batch: Sequence[int]) -> None:
        """Every node gets all, in chunks for its GPUs, which as many ranks send at once; others of a stage can then serve another node."""
        lanes = list(_lanes(batch, self._tensors, self._parts))
        for node in self._nodes:
            for lane in lanes:
                chunks = self._chunks(lane, max(1, round(len(node) / len(lanes))))
                having = self._near(self._having(lane[0]), node[0])
                blocks = [having[first : first + len(chunks)] for first in range(0, len(having), len(chunks))]
                ranks, left = self._cards.block(blocks, node), list[int]()
                for chunk in chunks:
                    left = left or list(ranks)
                    source, target = self._cards.pair(left, node)
                    left.remove(source)
                    self._add(chunk, source, target, node)

    def _add(self, parts: Sequence[int], source: int, target: int, group: Sequence[int]) -> None:
        num_bytes = sum(self._sizes[part] for part in parts)
        self._cards.sent[source] += num_bytes
        self._cards.received[target] += num_bytes
        self.network.append((source, target, parts))
        self.within += [(target, gpu, parts) for gpu in group if gpu != target]

    def _near(self, having: range, gpu: int) -> Sequence[int]:
        """Those on the node of that GPU, if there are any: what they send to it crosses no network."""
        if self._rank_nodes is None:
            return having
        key = having, self._node_of[gpu]
        if (found := self._on_node.get(key)) is None:
            found = self._on_node[key] = tuple(rank for rank in having if self._rank_nodes[rank] == key[1]) or having
        return found

    def _having(self, part: int) -> range:
        return holders(self._tensors[self._parts.tensor[part]], int(self._parts.shard[part]), self._layout, self._num_experts)

    def _chunks(self, lane: Sequence[int], count: int) -> list[list[int]]:
        """At most `count`, of about one size, the largest first."""
        sizes = np.array([self._sizes[part] for part in lane])
        ends = np.cumsum(sizes)
        numbers = (ends - sizes / 2) * count // max(ends[-1], 1)
        chunks = [part.tolist() for part in np.split(np.array(lane), 1 + np.flatnonzero(np.diff(numbers)))]
        return sorted(chunks, key=lambda chunk: -sum(self._sizes[part] for part in chunk))

    def _by_node(self, gpus: Sequence[int]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for gpu, node in zip(gpus, self._rollout.node_numbers()[gpus].tolist(), strict=True):
            found.setdefault(node, []).append(gpu)
        return list(found.values())


def _in_batches(tensors: Sequence[PlannedTensor], parts: Parts, *, of_experts: bool) -> Iterator[list[int]]:
    """The leading parts, first batches of all stages first."""
    found: dict[tuple[int, int], list[int]] = {}
    for part in np.flatnonzero(~parts.follows).tolist():
        tensor = tensors[parts.tensor[part]]
        if (tensor.expert is not None) == of_experts:
            found.setdefault((int(parts.batch[part]), tensor.stage), []).append(part)
    return (found[key] for key in sorted(found))


def _lanes(batch: Sequence[int], tensors: Sequence[PlannedTensor], parts: Parts) -> Iterator[list[int]]:
    """Parts by shard, which no rank has two of; what every rank has goes to the shards with the fewest bytes. Each begins with a part of
    the shard, if there is one."""
    is_cut = [tensors[parts.tensor[part]].cut_dim is not None for part in batch]
    shards = sorted({int(parts.shard[part]) for part, cut in zip(batch, is_cut, strict=True) if cut}) or [0]
    lanes: dict[int, list[int]] = {shard: [] for shard in shards}
    filled = dict.fromkeys(shards, 0)
    for part, cut in sorted(zip(batch, is_cut, strict=True), key=lambda each: not each[1]):
        shard = int(parts.shard[part]) if cut else min(shards, key=filled.__getitem__)
        lanes[shard].append(part)
        filled[shard] += int(parts.num_bytes[part])
    return (lane for lane in lanes.values() if lane)


def _transfers(rows: Sequence[_Rows]) -> Transfers:
    lengths = [len(parts) for _, _, parts in rows]
    source, target = (np.repeat(np.array([row[end] for row in rows], dtype=np.int32), lengths) for end in (0, 1))
    return Transfers(source=source, target=target, part=np.fromiter(chain.from_iterable(row[2] for row in rows), dtype=np.int32))


def _with_followers(transfers: Transfers, parts: Parts) -> Transfers:
    """The same with the scales of what is transferred."""
    has_scales = np.append(parts.follows[1:], False)[transfers.part]
    source, target, part = (np.concatenate([column, column[has_scales]]) for column in (transfers.source, transfers.target, transfers.part))
    part[len(transfers) :] += 1
    return Transfers(source=source, target=target, part=part)
