"""Scales of what a training rank sends in FP8."""

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.models.fp8_blocks import ScaleFormat, block_maxima, scales_of


class BlockScales:
    """Scales of the FP8 tensors of one push, on the rank that sends: of blocks of the whole tensors, whoever holds the rest of a block.

    Where blocks lie across the edges of shards, ranks that share a tensor exchange the blocks' largest values when a push begins: 4 bytes
    for 16384 values. All else needs no other rank, and is computed when it is first asked for.
    """

    def __init__(
        self, shard: Callable[[str], tuple[Tensor, tuple[int, ...]]], shapes: Mapping[str, tuple[int, ...]], scale_format: ScaleFormat
    ):
        """`shard`: of the tensor with that name what this rank holds of it, in the dtype that is quantized, and where that begins.

        `shapes`: of the whole tensors.
        """
        self._shard, self._shapes, self._format = shard, shapes, scale_format
        self._scales: dict[str, Tensor] = {}

    def exchange(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """`groups`: by the name of a tensor the ranks that share it. Collective in each: all its ranks give the same names in one order."""
        by_group: dict[dist.ProcessGroup, list[str]] = defaultdict(list)
        for name, group in groups.items():
            by_group[group].append(name)
        for group, members in by_group.items():
            maxima = [self._maxima(name) for name in members]
            together = torch.cat([each.flatten() for each in maxima])
            dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
            for name, each, found in zip(members, maxima, together.split([each.numel() for each in maxima]), strict=True):
                self._scales[name] = scales_of(found.view_as(each), self._format)

    def of(self, name: str) -> Tensor:
        """float32, of all blocks of the tensor; right where this rank holds some of the block."""
        if name not in self._scales:
            self._scales[name] = scales_of(self._maxima(name), self._format)
        return self._scales[name]

    def _maxima(self, name: str) -> Tensor:
        box, start = self._shard(name)
        return block_maxima(box, start, self._shapes[name])
