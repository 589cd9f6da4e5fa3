"""Parts into which the tensors of a push are cut, and batches: which tensors are wanted together. Pure.

A reader uses a tensor when it has all parts of it, and an engine that fuses the experts of a layer when it has all of these. It keeps them
until then. Hence batches: some tensors of a stage, or the experts of whole layers, which few ranks send to a node at about one time.
"""

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from moerl.config.schema.layout import Layout
from moerl.models.fp8_names import BLOCK
from moerl.weights.plan.tensor_specs import item_bytes
from moerl.weights.plan.transfer_plan import (
    Parts,
    PlannedTensor,
    RolloutLayout,
)  # fmt: skip

BATCH_PARTS = 16
"""A batch has as many bytes as so many of the largest parts: two of them for each GPU of a node of eight."""

SHARE_BYTES = 2**18
"""Smallest share of a GPU that is worth a part of its own: of smaller ones it compares the whole tensor."""

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
            size = num_rows // num_parts + (part < num_rows % num_parts)  # the first ones have one more
            yield first, left, size, right - left, size * row_bytes
            first += size


def _shard(size: int, count: int, index: int) -> tuple[int, int]:
    """Megatron's: all shards are equal, after padding that only the last ones have."""
    share = -(-size // count)
    return min(index * share, size), min((index + 1) * share, size)
