"""Tensors of a model where its ranks hold them: what each leaves as, by Hugging Face names, and what this rank has of it.

Nothing is gathered. What a push sends comes from here; loading and whole exports (native_bridge.py) stand on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moerl.models.bridge.rank_parameters import hf_names, owned_by
from moerl.models.expert_stacks import stack_of
from moerl.models.families.parts.family import Family, Rule
from moerl.models.shards import Sizes, cut_dim, merge, pieces
from moerl.types.errors import WeightError


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups over which a parameter may be split."""

    tensor: dist.ProcessGroup
    expert_tensor: dist.ProcessGroup
    expert: dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPart:
    """A tensor as it leaves in a push, or one expert's part of a stack."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    """The lowest rank that holds some of it."""
    expert: int | None
    cut_dim: int | None
    """The axis over which (expert) tensor-parallel ranks hold equal ranges; None: each holds the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part of a tensor that one rank holds, or of one expert's part of a stack."""

    tensor: Tensor
    """In the parameter's dtype; possibly a view of it."""
    start: tuple[int, ...]
    """In the tensor, along every axis."""
    group: dist.ProcessGroup
    """The ranks among which the tensor is cut, if it is."""


class RankTensors:
    def __init__(self, family: Family, chunks: Sequence[nn.Module], *, groups: Groups, sizes: Sizes, tied: bool, has_output: bool = True):
        """Collective. `chunks`: this rank's GPTModels. `tied`: the output layer is the embedding, so that it leaves once. `has_output`
        False: their last layer is none of the checkpoint's, and stays as it is."""
        self._groups, self._sizes, self._tied, self._family = groups, sizes, tied, family
        owned = (item for chunk in chunks for item in owned_by(chunk, family, expert_rank=groups.expert.rank()))
        self.held = {item.name: item for item in owned if has_output or item.name != "output_layer.weight"}
        """Parameters and buffers of this rank, by their names in the whole model."""
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        """Shape and dtype of a shard, known everywhere, so that nobody need send them along."""
        self.owners = self._find_owners()
        """Lowest rank that holds some of it, by names in the whole model, in one order on every rank; without a tied output layer."""
        # Of a tied model the last stage has the embedding a second time, and the first one sends it.
        named = ((hf, item, index) for item in self.held.values() for index, hf in enumerate(self.hf_names(item.rule, item.numbers)))
        self._held = {hf: (item, index) for hf, item, index in named}

    def parts(self, dtype: torch.dtype, *, with_mtp: bool = False) -> list[ExportPart]:
        """Tensors as they leave from a model of `dtype`, stacks in parts; the same on every rank. `with_mtp`: and those of the layers of
        multi-token prediction that were built, without copies of other tensors."""
        found = []
        for name, owner in self.owners.items():
            rule, numbers = self._family.find(name)
            if rule.is_mtp and not with_mtp:
                continue
            for hf, whole in zip(self.hf_names(rule, numbers), self.whole_on_meta(name, rule), strict=True):
                part = ExportPart(
                    name=hf,
                    shape=tuple(whole.shape),
                    dtype=leaves_as(rule, dtype),
                    owner=owner,
                    expert=numbers.get("expert"),
                    cut_dim=cut_dim(rule),
                )
                found.append(part)
        return found

    def piece(self, name: str, start: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A box of the tensor `name`, of which this rank holds all; possibly a view of a parameter. WeightError if it does not."""
        if name in self._held:
            key, part_start, part_shape = name, start, shape
        else:
            key, part_start, part_shape = f"{name}[{start[0]}]", start[1:], shape[1:]
        mine = self.shard(key)
        if mine is None:
            raise WeightError(f"tensor {name!r}: trainer rank {dist.get_rank()} holds nothing of it; the plan was made for another layout")
        begins = [begin - offset for begin, offset in zip(part_start, mine.start, strict=True)]
        box = tuple(slice(begin, begin + size) for begin, size in zip(begins, part_shape, strict=True))
        found = mine.tensor[box].to(leaves_as(self._held[key][0].rule, dtype))
        if found.shape != part_shape or any(begin < 0 for begin in begins):
            raise WeightError(
                f"tensor {name!r}: trainer rank {dist.get_rank()} holds {list(mine.tensor.shape)} at {list(mine.start)}, the plan of the "
                f"push wants {list(part_shape)} at {list(part_start)}; it was made for another layout"
            )
        return found.reshape(shape)

    def shard(self, name: str) -> Shard | None:
        """`name`: of a tensor, or of one expert's part of a stack. None: this rank holds nothing of it."""
        if name not in self._held:
            return None
        item, index = self._held[name]
        group, dim = self.shard_group(item.rule), cut_dim(item.rule)
        mine = pieces(item.rule, item.tensor.detach(), rank=group.rank(), num_ranks=group.size(), sizes=self._sizes)[index]
        start = [0] * mine.dim()
        if dim is not None:
            start[dim] = group.rank() * (len(item.tensor) if item.rule.shard == "vocab" else mine.shape[dim])
        return Shard(tensor=mine, start=tuple(start), group=group)

    def hf_names(self, rule: Rule, numbers: dict[str, int]) -> list[str]:
        """The Hugging Face tensors of a parameter of this model, without copies."""
        return hf_names(rule, numbers, num_layers=self._sizes.num_layers, tied=self._tied)

    def shard_group(self, rule: Rule) -> dist.ProcessGroup:
        """The ranks over which the parameter is split, if it is."""
        return self._groups.expert_tensor if rule.is_expert else self._groups.tensor

    def whole_on_meta(self, name: str, rule: Rule) -> list[Tensor]:
        """The Hugging Face tensors of a parameter, without memory."""
        shape, dtype = self._shapes[name]
        shard = torch.empty(shape, dtype=dtype, device="meta")
        return merge(rule, [shard] * self.shard_group(rule).size(), sizes=self._sizes)

    def _find_owners(self) -> dict[str, int]:
        held: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(held, {name: (item.tensor.shape, item.tensor.dtype) for name, item in self.held.items()})
        owners: dict[str, int] = {}
        for rank, shards in enumerate(held):
            self._shapes |= shards
            for name in shards:
                owners.setdefault(name, rank)
        if self._tied:
            owners.pop("output_layer.weight", None)
        return self._with_stacks_together(owners)

    def _with_stacks_together(self, owners: dict[str, int]) -> dict[str, int]:
        """Otherwise the parts of every stack, one after the other by rank, would be held at the same time."""
        first: dict[str, int] = {}
        for place, name in enumerate(owners):
            stack = stack_of(self.hf_names(*self._family.find(name))[0])
            first[name] = place if stack is None else first.setdefault(stack[0], place)
        return {name: owners[name] for name in sorted(owners, key=first.__getitem__)}


def leaves_as(rule: Rule, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the tensors that a parameter of a model of `model_dtype` leaves as."""
    return torch.float32 if rule.is_float32 else model_dtype
