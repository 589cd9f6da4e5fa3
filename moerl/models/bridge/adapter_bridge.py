"""A bridge of another package but for what only the package can do: names, checks before loading, what is exported beside its tensors.

A package maps the parameters that are built. Layers of multi-token prediction that are not leave as the native bridge lets them:
copies of the embedding and the output layer follow the trained tensor, everything else keeps the checkpoint's.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moerl.models.bridge.native_bridge import check_copies, check_shape, copy_names, mtp_layers, read_kept
from moerl.models.bridge.rank_parameters import RankParameter, hf_names, owned_by
from moerl.models.bridge.rank_tensors import Groups
from moerl.models.families.parts.family import Family
from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.models.shards import Sizes, merge
from moerl.types.errors import CheckpointError


class AdapterBridge(ABC):
    """Implements WeightBridge but for `load`."""

    def __init__(
        self, family: Family, chunks: Sequence[nn.Module], *, groups: Groups, sizes: Sizes, tied: bool, source: Path, dtype: torch.dtype
    ):
        """A collective. `chunks`: without layers of multi-token prediction. `dtype`: the model's. The others: those of `NativeBridge`."""
        self._family, self._chunks, self._groups, self._sizes = family, list(chunks), groups, sizes
        self._tied, self._source, self._dtype = tied, source, dtype
        self._own = self._open()
        layers = mtp_layers(source, sizes.num_layers)
        self._copies = {rule.hf[0]: copies for rule in family.rules if (copies := copy_names(rule, layers))}
        copied = [name for names in self._copies.values() for name in names]
        self._kept = sorted({name for names in layers.values() for name in names}.difference(self._own, copied))
        self._float32 = tuple(hf.rpartition("}")[2] for rule in family.rules if rule.is_float32 for hf in rule.hf)  # ends of names

    @abstractmethod
    def _open(self) -> list[str]:
        """Make the package's bridge; returns the Hugging Face names that it exports, in its order."""

    @abstractmethod
    def _whole(self) -> Iterable[tuple[str, Tensor]]:
        """The package's tensors, whole, on every rank."""

    def names(self, *, with_mtp: bool = True) -> list[str]:
        if not with_mtp:
            return self._own
        return [each for name in self._own for each in (name, *self._copies.get(name, ()))] + self._kept

    def dtype(self, name: str, model_dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if name.endswith(self._float32) else model_dtype

    def owned(self) -> None:
        """The packages gather every tensor on every rank, and tell no owner."""
        return None

    def _check(self, checkpoint: HFCheckpoint) -> None:
        """Raises CheckpointError for absent tensors, one of another shape on this rank, and a copy that is none."""
        absent = sorted(set(self._own) - set(checkpoint.names()))
        if absent:
            raise CheckpointError(
                f"{self._source}: no file of this checkpoint holds {', '.join(absent)}; is it complete, and of this model?"
            )
        for item in self._owned():
            group = self._groups.expert_tensor if item.rule.is_expert else self._groups.tensor
            whole = merge(item.rule, [torch.empty_like(item.tensor, device="meta")] * group.size(), sizes=self._sizes)
            names = hf_names(item.rule, item.numbers, num_layers=self._sizes.num_layers, tied=self._tied)
            for name, expected in zip(names, whole, strict=True):
                check_shape(name, checkpoint.shape(name), expected)
        for name, copies in self._copies.items():
            check_copies(name, copies, checkpoint)

    def export(self, dtype: torch.dtype, *, with_mtp: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The package's tensors, with copies and layers not built, which keep the checkpoint's dtype."""
        remaining = dict.fromkeys(self._own)
        for name, tensor in self._whole():
            if name in remaining and dist.get_rank() == 0:
                del remaining[name]  # the output layer of a tied model comes as a second embedding
                exported = tensor.detach().to(self.dtype(name, dtype))
                yield from ((each, exported) for each in (name, *(self._copies.get(name, ()) if with_mtp else ())))
        if with_mtp and self._kept and dist.get_rank() == 0:
            with HFCheckpoint(self._source) as checkpoint:
                yield from ((name, read_kept(checkpoint, name, dtype)) for name in self._kept)

    def tensors(self) -> Iterator[Tensor]:
        return (item.tensor for item in self._owned())

    def _owned(self) -> Iterator[RankParameter]:
        for chunk in self._chunks:
            yield from owned_by(chunk, self._family, expert_rank=self._groups.expert.rank())
