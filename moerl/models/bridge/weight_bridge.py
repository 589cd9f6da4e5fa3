"""Carrier of weights between a Megatron model and Hugging Face names: the seam, and the one place that chooses who does it.

The native bridge walks the family's rules. mbridge and Megatron-Bridge, optional packages, bring name maps and gathering
of their own.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from moerl.models.bridge.native_bridge import NativeBridge
from moerl.models.bridge.rank_tensors import Groups, RankTensors
from moerl.models.families.parts.family import Family
from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.models.shards import Sizes


class WeightBridge(Protocol):
    """Every rank makes its bridge, loads and exports at the same time: `export` is a collective, and `load` may be one."""

    def load(self, checkpoint: HFCheckpoint) -> None:
        """Fill every parameter of this rank. Raises CheckpointError for a missing tensor and for one of another shape."""

    def export(self, dtype: torch.dtype, *, with_mtp: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) on rank 0; nothing, after the same communication, on the others."""

    def names(self, *, with_mtp: bool = True) -> list[str]:
        """Every Hugging Face name, in the order of `export`."""

    def dtype(self, name: str, model_dtype: torch.dtype) -> torch.dtype:
        """Dtype of the exported tensor with that Hugging Face name in a model of `model_dtype`."""

    def owned(self) -> RankTensors | None:
        """Tensors of `export` where the ranks hold them. None: only an export can tell."""

    def tensors(self) -> Iterator[Tensor]:
        """Every parameter and every buffer that is part of the model's state, of this rank."""


def build_bridge(
    name: str, dtype: torch.dtype, family: Family, chunks: Sequence[nn.Module], *, groups: Groups, sizes: Sizes, tied: bool, source: Path,
    has_output: bool = True,
) -> WeightBridge:  # fmt: skip
    """The one of `name`, a value of train.bridge; further arguments are those of `NativeBridge`, `dtype` is the trainer's."""
    if name == "native" or not has_output:
        return NativeBridge(family, chunks, groups=groups, sizes=sizes, tied=tied, source=source, has_output=has_output)
    if name == "mbridge":
        from moerl.models.bridge.mbridge_adapter import MBridge

        return MBridge(family, chunks, groups=groups, sizes=sizes, tied=tied, source=source, dtype=dtype)
    from moerl.models.bridge.megatron_bridge_adapter import MegatronBridge

    return MegatronBridge(family, chunks, groups=groups, sizes=sizes, tied=tied, source=source, dtype=dtype)
