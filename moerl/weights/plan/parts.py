"""Into which parts the tensors of a push are cut, and which of them are wanted together. Pure.

A reader uses a tensor when it has all parts of it, and an engine that fuses the experts of a layer when it has all of these. It keeps them
until then. Hence batches: some tensors of a stage, or the experts of whole layers, which few ranks send to a node at about one time.
"""

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from moerl.config.schema.layout import Layout
from moerl.models.fp8_blocks import BLOCK
from moerl.weights.plan.tensor_specs import torch_dtype
from moerl.weights.plan.transfer_plan import Parts, PlannedTensor, RolloutLayout

BATCH_PARTS = 16
"""A batch has as many bytes as so many of the largest parts: two of them for each GPU of a node of eight."""

_Box = tuple[int, int, int, int, int]
"""First row and column, numbers of rows and columns, bytes."""


def parts_of(tensors: Sequence[PlannedTensor], layout: Layout, rollout: RolloutLayout, *, part_bytes: int) -> Parts:
    """`part_bytes`: largest part, of one row at least, of a tensor that every GPU reads; experts are cut by tensor parallelism only."""
    rows: list[tuple[int, ...]] = []
    scales = {tensor.scales_of: index for index, tensor in enumerate(tensors) if tensor.scales_of is not None}
    batches = _batches(tensors, rollout, limit=BATCH_PARTS * part_bytes)
    for index, tensor in enumerate(tensors):
        if tensor.scales_of is not None:
            continue
        num_shards = 1 if tensor.cut_dim is None else layout.tp if tensor.expert is None else layout.etp
        for shard in range(num_shards):
            for part in _parts_of(tensor, shard, num_shards, part_bytes):
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
    return (first, left, stop - first, right - left, size * torch_dtype(scales.spec).itemsize) if size else None


def _parts_of(tensor: PlannedTensor, shard: int, num_shards: int, part_bytes: int) -> Iterator[_Box]:
    """Parts of one shard, which is cut into parts by rows."""
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
