"""What a model family declares: its Megatron configuration, and how every parameter maps to Hugging Face tensors.

One rule serves both directions. `split` takes the Hugging Face tensors of a parameter to the shard of one tensor-parallel
rank; `merge` takes the shards of all of them back.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Shard = Literal["replicated", "column", "row", "vocab", "qkv", "gate_up"]
"""Over tensor parallel (expert tensor parallel for experts). column: rows of the [out, in] weight. row: its columns. vocab: column,
after padding the vocabulary. qkv: column over query groups, each holding its queries, key and value. gate_up: both column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One parameter or buffer of Megatron, with {layer}, {expert} and {mtp} where its name counts them, all from 0 over the whole model.

    {mtp} counts the layers of the multi-token prediction block; Hugging Face numbers them on from the last layer of the model.
    """

    megatron: str
    hf: tuple[str, ...]
    shard: Shard = "replicated"
    copies: tuple[str, ...] = ()
    """Names under which published checkpoints repeat the tensor, once for every {mtp}."""
    is_float32: bool = False
    """Kept and exported in float32 whatever the model's dtype."""

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.megatron

    @property
    def is_mtp(self) -> bool:
        return "{mtp}" in self.megatron


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    rules: tuple[Rule, ...]
    transformer_config: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From config.json to the keyword arguments of Megatron's TransformerConfig that describe the architecture (with
    multi_latent_attention: of its MLATransformerConfig)."""

    def find(self, name: str) -> tuple[Rule, dict[str, int]]:
        """The rule of a parameter by its global Megatron name, and its {layer}, {expert} and {mtp}. KeyError if none matches."""
        for rule in self.rules:
            match = _pattern(rule.megatron).fullmatch(name)
            if match:
                return rule, {key: int(value) for key, value in match.groupdict().items()}
        raise KeyError(f"no rule maps the Megatron parameter {name}; add one to its family in moerl/models")


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(layer|expert|mtp)\\}", r"(?P<\1>\\d+)", re.escape(template)))


def num_mtp_layers(hf: Mapping[str, Any]) -> int:
    """Layers of the multi-token prediction block by config.json."""
    number = hf.get("num_nextn_predict_layers")
    return 0 if number is None else number


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What splitting and merging need to know beside the tensors."""

    num_layers: int
    """Without those of multi-token prediction."""
    num_query_groups: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int


def split(rule: Rule, tensors: Sequence[Tensor], *, rank: int, num_ranks: int, sizes: Sizes) -> Tensor:
    """The shard of `rank`, a view or a new tensor."""
    if rule.shard == "replicated":
        return tensors[0]
    if rule.shard == "row":
        return tensors[0].chunk(num_ranks, dim=1)[rank]
    if rule.shard == "gate_up":
        return torch.cat([tensor.chunk(num_ranks)[rank] for tensor in tensors])
    if rule.shard == "qkv":
        return _interleave(tensors, sizes.num_query_groups).chunk(num_ranks)[rank]
    whole = tensors[0] if rule.shard == "column" else _pad_rows(tensors[0], sizes.padded_vocab_size)
    return whole.chunk(num_ranks)[rank]


def merge(rule: Rule, shards: Sequence[Tensor], *, sizes: Sizes) -> list[Tensor]:
    """The Hugging Face tensors, in the order of `rule.hf`."""
    if rule.shard == "replicated":
        return [shards[0]]
    if rule.shard == "row":
        return [torch.cat(list(shards), dim=1)]
    if rule.shard == "gate_up":
        return [torch.cat(parts) for parts in zip(*(shard.chunk(2) for shard in shards), strict=True)]
    whole = torch.cat(list(shards))
    if rule.shard == "qkv":
        return _separate(whole, sizes.num_query_groups, sizes.head_dim)
    return [whole[: sizes.vocab_size] if rule.shard == "vocab" else whole]


def _interleave(tensors: Sequence[Tensor], groups: int) -> Tensor:
    """q, k, v [heads * d, in] -> [groups * (queries per group + 2) * d, in], Megatron's order."""
    return torch.cat([t.reshape(groups, -1, *t.shape[1:]) for t in tensors], dim=1).reshape(-1, *tensors[0].shape[1:])


def _separate(whole: Tensor, groups: int, head_dim: int) -> list[Tensor]:
    per_group = whole.reshape(groups, -1, *whole.shape[1:])
    queries = per_group.shape[1] - 2 * head_dim
    return [part.reshape(-1, *whole.shape[1:]) for part in per_group.split([queries, head_dim, head_dim], dim=1)]


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])
