"""Who sends what to whom in a push, as data, and how it is decided (by `senders.py`): from the trainer's layout, the rollout's and the
model's tensors, before anything runs.

    trainer rank --network--> one GPU of every node that reads the tensor --NVLink--> the other readers of that node

Experts go from their owner to the GPUs that serve them and to no other. Nothing crosses the network to a node twice. What every GPU of a
rollout holds (attention, norms, embeddings) is cut into parts that are spread over the node's GPUs, as each has a network card of its
own. Among ranks that hold the same the one that has sent least sends. A reader must have all of a tensor, and of some layers, before it can
use any of it: what is wanted together makes a batch (`tensor_parts.py`), and has few senders. Pure: integers in, integers out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moerl.config.schema.layout import Layout
from moerl.types.push import TensorSpec
from moerl.weights.plan.tensor_specs import num_bytes

PART_BYTES = 32 * 2**20
"""Parts of tensors that every GPU reads: a hundred parts and more for each GPU of a node in the largest models."""


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
    """Node of every GPU; None: `gpus_per_node` are on each, in order."""

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
class Rails:
    """Rail of every process of a push: the number of its network card among those of its node (hardware/rails.py). In a fabric that is
    built by rails, cards of one number are on the same leaf switches, and what goes between others crosses the spine."""

    senders: tuple[int, ...]
    """By trainer rank."""
    readers: tuple[int, ...]
    """By GPU of the rollout."""


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
    """Columns: of every part its tensor, its shard among tensor-parallel ranks, its box in the tensor, its bytes, and its batch."""

    tensor: np.ndarray  # int32, index into Plan.tensors
    shard: np.ndarray  # int32; 0 for a tensor that is not cut
    start: np.ndarray  # int64 [parts, 2], of the first two axes of the tensor; 0 where it has fewer
    size: np.ndarray  # int64 [parts, 2]; 1 where it has fewer
    num_bytes: np.ndarray  # int64
    follows: np.ndarray  # bool: scales, which travel with the part before them: its values
    batch: np.ndarray  # int32, counted within the stage, of experts and of all else

    def unit_bytes(self) -> np.ndarray:
        """int64 [parts]: of each with the scales that follow it."""
        return self.num_bytes + np.append(np.where(self.follows, self.num_bytes, 0)[1:], 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relays:
    """Trainer ranks on the nodes of the rollout: each gets over the network what a GPU of its node reads first, and lends it there."""

    node_of_rank: tuple[int, ...]
    """Node of every trainer rank, as RolloutLayout.node_numbers counts them; -1: one without servers."""
    of_gpu: tuple[int, ...]
    """By GPU of the rollout the rank that gets for it what it is the first of its node to read: the one on that GPU, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    tensors: tuple[PlannedTensor, ...]
    parts: Parts
    network: Transfers
    """From trainer ranks to the first readers of nodes; with `relays` also on the sender's own node, where nothing crosses a network."""
    spread: Transfers
    """Within nodes, of what the first readers got."""
    layout: Layout
    rollout: RolloutLayout
    relays: Relays | None = None

    def boxes(self) -> Iterator[tuple[PlannedTensor, tuple[int, ...], tuple[int, ...]]]:
        """Tensor of every part, where the part begins in it, and its shape."""
        rows = (self.parts.tensor.tolist(), self.parts.start.tolist(), self.parts.size.tolist())
        for index, start, size in zip(*rows, strict=True):
            tensor = self.tensors[index]
            shape = tensor.spec.shape
            if len(shape) == 2:
                yield tensor, tuple(start), tuple(size)
            else:
                yield tensor, (*start[: len(shape)], *(0,) * (len(shape) - 2)), (*size[: len(shape)], *shape[2:])

    def received(self) -> np.ndarray:
        """int64 [GPUs of the rollout]: bytes over the network."""
        return _sum_by(self.network.target, self._crossing(), self.rollout.num_gpus)

    def sent(self) -> np.ndarray:
        """int64 [trainer ranks]: bytes over the network."""
        return _sum_by(self.network.source, self._crossing(), self.layout.ranks)

    def _crossing(self) -> np.ndarray:
        """int64 [transfers]: bytes that leave a node."""
        num_bytes = self.parts.num_bytes[self.network.part]
        if self.relays is None:
            return num_bytes
        stays = np.array(self.relays.node_of_rank)[self.network.source] == self.rollout.node_numbers()[self.network.target]
        return np.where(stays, 0, num_bytes)

    def share_on_rails(self, rails: Rails) -> float:
        """Share of the bytes over the network that go between two cards of one rail."""
        is_same = np.array(rails.senders)[self.network.source] == np.array(rails.readers)[self.network.target]
        num_bytes = self._crossing()
        return float(num_bytes[is_same].sum() / max(num_bytes.sum(), 1))

    def spread_in_node(self) -> np.ndarray:
        """int64 [GPUs of the rollout]: bytes from GPUs of the same node."""
        return _sum_by(self.spread.target, self.parts.num_bytes[self.spread.part], self.rollout.num_gpus)


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


def _sum_by(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(index, weights=values, minlength=size).astype(np.int64)  # exact: sums stay below 2**53
