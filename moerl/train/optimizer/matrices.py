"""Matrices that Muon updates: their ranges on data-parallel ranks, which rank makes each orthogonal, and how they are cut."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matrix:
    """A weight of this rank, and of its data-parallel ranks: they agree on all of this."""

    weight: nn.Parameter
    ranges: tuple[tuple[int, int], ...]
    """By data-parallel rank: elements of the flattened weight that it updates; (0, 0) for none."""
    owner: int
    """The data-parallel rank that makes it orthogonal."""
    rows: tuple[int, ...]
    """Rows of queries, keys and values in each query group, which are matrices of their own; () for one matrix."""
    tensor_group: dist.ProcessGroup
    cut: int | None
    """Axis along which tensor parallelism cuts it over `tensor_group`."""

    @property
    def whole(self) -> int:
        """Elements of its tensor-parallel ranks together."""
        return self.weight.numel() * (1 if self.cut is None else self.tensor_group.size())

    def numel(self, rank: int) -> int:
        """Elements that a data-parallel rank updates."""
        start, stop = self.ranges[rank]
        return stop - start

    @property
    def kind(self) -> tuple[Any, ...]:
        """Shape and parts that those share which are made orthogonal together."""
        return self.weight.shape, self.rows, self.cut


def is_matrix(weight: nn.Parameter, name: str) -> bool:
    """Whether Muon updates it. A single row or column has one singular value: orthogonal, it would be its sign alone.

    Megatron marks embedding and output layer, but 0.16.1 not the copy of the embedding that multi-token prediction has on another stage.
    """
    is_end = getattr(weight, "is_embedding_or_output_parameter", False) or name.endswith("word_embeddings.weight")
    return weight.dim() == 2 and min(weight.shape) > 1 and not is_end


def rounds(matrices: Iterable[Matrix], most: int) -> list[list[Matrix]]:
    """Matrices that are exchanged and made orthogonal together. The k-th `most` elements of every owner, or its k-th matrix that is as
    large, are in round k: in their order in memory those of one rank would follow each other, and the others wait."""
    found: list[list[Matrix]] = []
    number: Counter[int] = Counter()
    owned: Counter[int] = Counter()
    for matrix in matrices:
        if owned[matrix.owner] and owned[matrix.owner] + matrix.whole > most:
            number[matrix.owner] += 1
            owned[matrix.owner] = 0
        owned[matrix.owner] += matrix.whole
        if number[matrix.owner] == len(found):
            found.append([])
        found[number[matrix.owner]].append(matrix)
    return found


def owners(shapes: Sequence[tuple[int, int]], held: Sequence[Sequence[int]]) -> list[int]:
    """The rank for each matrix: of those that hold some of it, the one with least to multiply, large matrices first. `held`: elements of
    [matrix][rank]."""
    loads, chosen = [0] * len(held[0]) if held else [], [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda number: -_products(shapes[number])):
        chosen[number] = min((rank for rank, elements in enumerate(held[number]) if elements), key=lambda rank: loads[rank])
        loads[chosen[number]] += _products(shapes[number])
    return chosen


def _products(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] * min(shape)


def matrices_of(optimizer: Any, names: Mapping[nn.Parameter, tuple[str, Any]]) -> list[Matrix]:
    """Those of a distributed optimizer, in an order that its data-parallel ranks share. Collective."""
    weights = [weight for buffer in optimizer.buffers for weight in buffer.params if is_matrix(weight, names[weight][0])]
    if not weights:  # of all data-parallel ranks
        return []
    own, group = dict(owned_ranges(optimizer)), optimizer.data_parallel_group
    mine = torch.tensor([own.get(weight, (0, 0)) for weight in weights], device=weights[0].device)
    found = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(found, mine, group=group)
    ranges = [[(start, stop) for start, stop in of_weight] for of_weight in torch.stack(found, 1).tolist()]
    chosen = owners([tuple(weight.shape) for weight in weights], [[stop - start for start, stop in of] for of in ranges])
    return [
        Matrix(
            weight=weight, ranges=tuple(of), owner=owner, rows=_rows(*names[weight]), tensor_group=_tensor_group(weight),
            cut=_cut(weight, names[weight][0], _tensor_group(weight).size()),
        )
        for weight, of, owner in zip(weights, ranges, chosen, strict=True)
    ]  # fmt: skip


def owned_ranges(optimizer: Any) -> Iterator[tuple[nn.Parameter, tuple[int, int]]]:
    """(parameter, the range of its flattened elements that this data-parallel rank updates), of a distributed optimizer."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for weight, ranges in bucket["param_map"].items():
                    yield weight, (ranges["param"].start, ranges["param"].end)


def _tensor_group(weight: nn.Parameter) -> dist.ProcessGroup:
    """Ranks over which tensor parallelism cuts it, as Megatron marks experts."""
    from megatron.core import parallel_state  # not with this module, whose pure functions need none

    is_dense = getattr(weight, "allreduce", True)
    return parallel_state.get_tensor_model_parallel_group() if is_dense else parallel_state.get_expert_tensor_parallel_group()


def _rows(name: str, config: Any) -> tuple[int, ...]:
    """megatron/core/transformer/attention.py, get_query_key_value_tensors."""
    if not name.endswith("self_attention.linear_qkv.weight"):
        return ()
    queries = config.num_attention_heads // config.num_query_groups * config.kv_channels
    gates = (queries,) if getattr(config, "attention_output_gate", False) else ()
    return (queries, *gates, config.kv_channels, config.kv_channels)


def _cut(weight: nn.Parameter, name: str, size: int) -> int | None:
    if size == 1:
        return None
    if ".experts." in name:  # Transformer Engine is not told of how Megatron cuts experts
        return 0 if ".linear_fc1." in name else 1
    return getattr(weight, "partition_dim", None) if getattr(weight, "tensor_model_parallel", False) else None
