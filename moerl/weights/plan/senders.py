"""Senders of a push: which rank sends each part of a tensor to which GPUs, batch by batch (tensor_parts.py). Pure."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np

from moerl.config.schema.layout import Layout
from moerl.weights.plan.tensor_parts import parts_of
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

RAIL_PARTS = 4
"""Slack of a card for the sake of its rail, over the least busy one that would do, in largest parts: 128 MiB, 2.7 ms at
400 Gbit/s."""


T = TypeVar("T")
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


class Cards:
    """Bytes that the network cards of ranks and of GPUs of the rollout have by now, and whose turn is next: evenly, and on one rail where
    that costs little."""

    def __init__(self, layout: Layout, rollout: RolloutLayout, rails: Rails | None, *, slack: int):
        """`slack`: bytes by which one may be ahead of the least for the sake of its rail."""
        self.sent, self.received = [0] * layout.ranks, [0] * rollout.num_gpus
        self._rails, self._slack = rails, slack

    def target(self, group: Sequence[int], having: Sequence[int]) -> int:
        """GPU of `group`: that with the least, of those on a rail of one that may send if they are not far ahead."""
        if self._rails is None:
            return min(group, key=self.received.__getitem__)
        rails = {self._rails.senders[rank] for rank in having}
        return self._least([gpu for gpu in group if self._rails.readers[gpu] in rails], group, self.received.__getitem__)

    def source(self, having: Sequence[int], target: int) -> int:
        """Rank of `having`: that with the least, of those on the target's rail if they are not far ahead."""
        if self._rails is None:
            return min(having, key=self.sent.__getitem__)
        rail = self._rails.readers[target]
        return self._least([rank for rank in having if self._rails.senders[rank] == rail], having, self.sent.__getitem__)

    def block(self, blocks: Sequence[Sequence[int]], node: Sequence[int]) -> Sequence[int]:
        """Group of ranks, of several that hold the same: that which has sent least, of those whose rails all are the node's."""
        if self._rails is None:
            return min(blocks, key=self._average)
        rails = {self._rails.readers[gpu] for gpu in node}
        return self._least(
            [ranks for ranks in blocks if rails.issuperset(self._rails.senders[rank] for rank in ranks)], blocks, self._average
        )

    def pair(self, ranks: Sequence[int], group: Sequence[int]) -> tuple[int, int]:
        """Rank of `ranks` and GPU of `group` for what any of these may send to any of those."""
        if self._rails is None:
            return min(ranks, key=self.sent.__getitem__), self.target(group, ranks)
        pairs = [(rank, self.target(group, [rank])) for rank in ranks]
        return min(pairs, key=lambda pair: self.sent[pair[0]] + self.received[pair[1]])

    def _average(self, ranks: Sequence[int]) -> float:
        return sum(self.sent[rank] for rank in ranks) / len(ranks)

    def _least(self, preferred: Sequence[T], others: Sequence[T], filled: Callable[[T], float]) -> T:
        least = min(others, key=filled)
        found = min(preferred, key=filled, default=least)
        return found if filled(found) <= filled(least) + self._slack else least


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
