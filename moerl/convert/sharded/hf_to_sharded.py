"""Plan of a sharded checkpoint that is made of a Hugging Face folder: which tensors of the folder each of its tensors is made of."""

from functools import partial

import torch
from torch import Tensor

from moerl.convert.hf import hf_plan
from moerl.convert.hf.hf_source import HFSource
from moerl.convert.hf.joined_stacks import in_parts
from moerl.convert.sharded.completeness import tensor_problems
from moerl.convert.sharded.parameters import Parameter, family_of, num_experts, parameters_of, sizes_of
from moerl.convert.sharded.sharded_source import ShardPart
from moerl.convert.tensors.entry import computed, read_whole
from moerl.models.shards import Sizes, split
from moerl.types.errors import ConvertError


def parts_of(source: HFSource, dtype: torch.dtype) -> list[ShardPart]:
    """Raises ConvertError with everything that is missing, unknown or of another shape than its like."""
    family = family_of(source.config)
    sizes = sizes_of(family, source.config)
    source = in_parts(source, family, num_experts(family, source.config))
    if problems := [*hf_plan.fp8_problems(source), *tensor_problems(source, family)]:
        raise ConvertError(problems)
    order = {name: place for place, name in enumerate(source.tensors)}
    held = (each for each in parameters_of(family, source.config) if each.hf[0] in order)  # a folder may lack multi-token prediction
    parameters = sorted(held, key=lambda each: min(map(order.__getitem__, each.hf)))
    return [_part(source, each, sizes, dtype, num_experts(family, source.config)) for each in parameters]


def _part(source: HFSource, parameter: Parameter, sizes: Sizes, dtype: torch.dtype, count: int) -> ShardPart:
    kept = torch.float32 if parameter.rule.is_float32 else dtype
    split_whole = partial(split, parameter.rule, rank=0, num_ranks=1, sizes=sizes)
    shape = tuple(split_whole([torch.empty(source.tensors[name].shape, device="meta") for name in parameter.hf]).shape)

    def make() -> Tensor:
        return split_whole([read_whole(hf_plan.plain_entry(source, name, kept)).to(kept) for name in parameter.hf])

    entry = computed(" + ".join(parameter.hf), kept, shape, make)
    stacks = (count,) * len(parameter.place)
    return ShardPart(entry=entry, key=parameter.key, offset=(*parameter.place, *(0 for _ in shape)), global_shape=(*stacks, *shape))
