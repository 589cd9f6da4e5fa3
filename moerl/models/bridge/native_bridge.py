"""Carry parameters between a Megatron model spread over ranks and Hugging Face names, one tensor at a time.

Both directions walk the family's rules. Export is a collective: every rank iterates it to the end, rank 0 gets the tensors.
An expert or a pipeline stage is held by some ranks only; the lowest of them gathers its tensor-parallel shards and sends.
Layers of multi-token prediction that are not trained are not built: they leave as they are in the checkpoint.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moerl.models.bridge.rank_tensors import Groups, RankTensors, leaves_as
from moerl.models.expert_stacks import restack, stack_of, stored_names
from moerl.models.families.parts.family import Family, Rule
from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.models.shards import Sizes, cut_dim, join, merge, own_range
from moerl.types.errors import CheckpointError


class NativeBridge:
    """Implements WeightBridge."""

    def __init__(
        self, family: Family, chunks: Sequence[nn.Module], *, groups: Groups, sizes: Sizes, tied: bool, source: Path,
        has_output: bool = True,
    ):  # fmt: skip
        """`chunks`: this rank's GPTModels. `tied`: the output layer is the embedding, so that it is not exported twice. `has_output`
        False: their last layer is none of the checkpoint's, and stays as it is.

        `source`: the checkpoint the model comes from. Its tensors of multi-token prediction are exported, whether built or not.
        """
        self._sizes, self._family, self._source = sizes, family, source
        self._ranks = RankTensors(family, chunks, groups=groups, sizes=sizes, tied=tied, has_output=has_output)
        self._mtp_layers = mtp_layers(source, sizes.num_layers)
        parts = [hf for name in self._ranks.owners for hf in self._export_names(name, with_mtp=True)]
        built = set(stored_names(parts))
        self._num_parts = Counter(stack[0] for part in parts if (stack := stack_of(part)) is not None)
        self._float32 = {
            hf for name in self._ranks.owners if family.find(name)[0].is_float32 for hf in self._export_names(name, with_mtp=True)
        }
        self._kept = sorted({hf for names in self._mtp_layers.values() for hf in names} - built)

    def tensors(self) -> Iterator[Tensor]:
        return (item.tensor for item in self._ranks.held.values())

    def load(self, checkpoint: HFCheckpoint) -> None:
        for item in self._ranks.held.values():
            names, group = self._ranks.hf_names(item.rule, item.numbers), self._ranks.shard_group(item.rule)
            whole = merge(item.rule, [torch.empty_like(item.tensor, device="meta")] * group.size(), sizes=self._sizes)
            for name, expected in zip(names, whole, strict=True):
                check_shape(name, checkpoint.shape(name), expected)
            parts = [self._read_own(checkpoint, name, item.rule, tensor.shape, group) for name, tensor in zip(names, whole, strict=True)]
            with torch.no_grad():
                item.tensor.copy_(join(item.rule, parts, num_ranks=group.size(), sizes=self._sizes))
            if dist.get_rank() == self._ranks.owners.get(item.name):
                check_copies(names[0], copy_names(item.rule, self._mtp_layers), checkpoint)

    def names(self, *, with_mtp: bool = True) -> list[str]:
        names = stored_names(hf for name in self._ranks.owners for hf in self._export_names(name, with_mtp=with_mtp))
        return names + (self._kept if with_mtp else [])

    def dtype(self, name: str, model_dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if name in self._float32 else model_dtype

    def export(self, dtype: torch.dtype, *, with_mtp: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor in `dtype`) on rank 0; nothing, after the same communication, on the others.

        Tensors of layers that were not built keep the checkpoint's dtype, unless that is FP8. `with_mtp` False leaves out all of
        multi-token prediction.
        """
        yield from restack(self._parts(dtype, with_mtp=with_mtp), self._num_parts)
        if with_mtp and self._kept and dist.get_rank() == 0:
            with HFCheckpoint(self._source) as checkpoint:
                yield from ((name, read_kept(checkpoint, name, dtype)) for name in self._kept)

    def owned(self) -> RankTensors:
        return self._ranks

    def _read_own(self, checkpoint: HFCheckpoint, name: str, rule: Rule, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
        """Part that this rank holds of a tensor of `shape`."""
        dim = cut_dim(rule)
        if dim is None or group.size() == 1:
            return checkpoint.read(name)
        return checkpoint.read(name, own_range(rule, shape[dim], rank=group.rank(), num_ranks=group.size(), sizes=self._sizes), dim)

    def _parts(self, dtype: torch.dtype, *, with_mtp: bool) -> Iterator[tuple[str, Tensor]]:
        """Names that `export` gives of the model that is built, with the stacks of experts in parts."""
        for name, owner in self._ranks.owners.items():
            rule, _ = self._family.find(name)
            if rule.is_mtp and not with_mtp:
                continue
            tensors = self._collect(name, rule, owner)
            if dist.get_rank() == 0:
                # A tensor with copies has one Hugging Face tensor, so that the names after the first are its copies.
                names = self._export_names(name, with_mtp=with_mtp)
                tensors = [tensor.to(leaves_as(rule, dtype)) for tensor in tensors]
                yield from zip(names, tensors + tensors[:1] * (len(names) - len(tensors)), strict=True)

    def _collect(self, name: str, rule: Rule, source: int) -> list[Tensor]:
        """The whole tensors on rank 0, from the shards of the ranks that gather with `source`; empty elsewhere."""
        group = self._ranks.shard_group(rule)
        gathers = name in self._ranks.held and source in dist.get_process_group_ranks(group)
        shards = self._gather(self._ranks.held[name].tensor.detach(), rule, group) if gathers else []
        tensors = merge(rule, shards, sizes=self._sizes) if gathers else []
        if source == 0 or dist.get_rank() not in (0, source):
            return tensors
        if dist.get_rank() == source:
            for tensor in tensors:
                dist.send(tensor.contiguous(), dst=0)
            return []
        return [_receive(source, whole) for whole in self._ranks.whole_on_meta(name, rule)]

    @staticmethod
    def _gather(shard: Tensor, rule: Rule, group: dist.ProcessGroup) -> list[Tensor]:
        if group.size() == 1 or rule.shard == "replicated":
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(shards, shard.contiguous(), group=group)
        return shards

    def _export_names(self, name: str, *, with_mtp: bool) -> list[str]:
        rule, numbers = self._family.find(name)
        if not with_mtp:
            return [] if rule.is_mtp else self._ranks.hf_names(rule, numbers)
        return self._ranks.hf_names(rule, numbers) + copy_names(rule, self._mtp_layers)


def mtp_layers(source: Path, num_layers: int) -> dict[int, set[str]]:
    """Names of the checkpoint's tensors in layers after the model's last, by layer."""
    layers: dict[int, set[str]] = {}
    with HFCheckpoint(source) as checkpoint:
        for name in checkpoint.names():
            parts = name.split(".")
            if parts[:2] == ["model", "layers"] and int(parts[2]) >= num_layers:
                layers.setdefault(int(parts[2]), set()).add(name)
    return dict(sorted(layers.items()))


def copy_names(rule: Rule, layers: Mapping[int, set[str]]) -> list[str]:
    """Those of the rule's copies that a source with these `mtp_layers` holds."""
    return [name for copy in rule.copies for layer, held in layers.items() if (name := copy.format(mtp=layer)) in held]


def read_kept(checkpoint: HFCheckpoint, name: str, dtype: torch.dtype) -> Tensor:
    """A tensor of a layer that was not built, as `export(dtype)` gives it."""
    tensor = checkpoint.read(name)
    return tensor.to(dtype) if checkpoint.is_fp8(name) else tensor


def check_copies(name: str, copies: Sequence[str], checkpoint: HFCheckpoint) -> None:
    """Raises CheckpointError for one of the `copies` of tensor `name` that is none."""
    for copy in copies:
        if not checkpoint.read(copy).equal(checkpoint.read(name)):
            reason = f"Megatron shares {name} with the layers of multi-token prediction; fetch the checkpoint again"
            raise CheckpointError(f"{copy} differs from {name}, of which it must be a copy: {reason}")


def check_shape(name: str, shape: tuple[int, ...], expected: Tensor) -> None:
    if shape != expected.shape:
        raise CheckpointError(
            f"{name} has shape {shape}, but by its config.json it must have {tuple(expected.shape)}: "
            "weights and config.json are of different models; fetch both again"
        )


def _receive(source: int, like: Tensor) -> Tensor:
    tensor = torch.empty(like.shape, dtype=like.dtype, device=torch.cuda.current_device())
    dist.recv(tensor, src=source)
    return tensor
