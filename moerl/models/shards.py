"""Cut a parameter over tensor-parallel ranks, and put it together again.

`split` takes the Hugging Face tensors of a parameter to the shard of one rank, `join` what `own_range` says of them; `merge` takes the
shards of all ranks back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moerl.models.families.parts.family import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes that splitting and merging need beside the tensors."""

    num_layers: int
    """Without those of multi-token prediction."""
    num_query_groups: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    delta: "DeltaSizes | None" = None

    @classmethod
    def of(cls, fields: Mapping[str, Any], *, vocab_size: int, padded_vocab_size: int | None = None) -> "Sizes":
        """`fields`: of Megatron's configuration."""
        heads = fields["num_attention_heads"]
        return cls(
            num_layers=fields["num_layers"],
            num_query_groups=fields.get("num_query_groups", heads),
            head_dim=fields.get("kv_channels", fields["hidden_size"] // heads),
            vocab_size=vocab_size,
            padded_vocab_size=vocab_size if padded_vocab_size is None else padded_vocab_size,
            delta=DeltaSizes.of(fields),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """Heads of a gated delta net, and their widths."""

    keys: int
    values: int
    """A multiple of `keys`."""
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "DeltaSizes | None":
        """`fields`: of Megatron's configuration. None: the model has no such layers."""
        if fields.get("experimental_attention_variant") != "gated_delta_net":
            return None
        return cls(
            keys=fields["linear_num_key_heads"], values=fields["linear_num_value_heads"], key_dim=fields["linear_key_head_dim"],
            value_dim=fields["linear_value_head_dim"],
        )  # fmt: skip


def split(rule: Rule, tensors: Sequence[Tensor], *, rank: int, num_ranks: int, sizes: Sizes) -> Tensor:
    """The shard of `rank`, a view or a new tensor."""
    if rule.shard == "replicated":
        return tensors[0]
    if rule.shard == "row":
        return tensors[0].chunk(num_ranks, dim=1)[rank]
    if rule.shard == "gate_up":
        return torch.cat([tensor.chunk(num_ranks)[rank] for tensor in tensors])
    if rule.shard == "alternating":
        return _gate_up(tensors[0], rank, num_ranks)
    if rule.shard == "alternating_columns":
        return _gate_up(tensors[0].T, rank, num_ranks)
    if rule.shard == "transposed_row":
        return tensors[0].T.chunk(num_ranks, dim=1)[rank]
    if rule.shard in ("qkv", "gated_qkv"):
        parts = _gates_apart(tensors, sizes) if rule.shard == "gated_qkv" else tensors
        return _interleave(parts, sizes.num_query_groups).chunk(num_ranks)[rank]
    if rule.shard == "delta_inputs":
        return _delta_inputs(tensors, sizes.delta)
    whole = tensors[0] if rule.shard == "column" else _pad_rows(tensors[0], sizes.padded_vocab_size)
    return whole.chunk(num_ranks)[rank]


def merge(rule: Rule, shards: Sequence[Tensor], *, sizes: Sizes) -> list[Tensor]:
    """The Hugging Face tensors, in the order of `rule.hf`."""
    if rule.shard == "replicated":
        return [shards[0]]
    if rule.shard == "row":
        return [_joined(shards, dim=1)]
    if rule.shard == "gate_up":
        return [_joined(parts) for parts in zip(*(shard.chunk(2) for shard in shards), strict=True)]
    if rule.shard == "alternating":
        return [_alternate(shards)]
    if rule.shard == "alternating_columns":
        return [_alternate(shards).T.contiguous()]
    if rule.shard == "transposed_row":
        return [_joined(shards, dim=1).T.contiguous()]
    whole = _joined(shards)
    if rule.shard == "qkv":
        return _separate(whole, sizes.num_query_groups, sizes.head_dim)
    if rule.shard == "gated_qkv":
        return _with_gates(_separate(whole, sizes.num_query_groups, sizes.head_dim), sizes)
    if rule.shard == "delta_inputs":
        return _by_key_head(whole, sizes.delta)
    return [whole[: sizes.vocab_size] if rule.shard == "vocab" else whole]


def pieces(rule: Rule, shard: Tensor, *, rank: int, num_ranks: int, sizes: Sizes) -> list[Tensor]:
    """Piece that the shard of `rank` is of each Hugging Face tensor: a range along one axis (`cut_dim`). Views where the memory allows
    it."""
    rows = max(min(sizes.vocab_size - rank * len(shard), len(shard)), 0) if rule.shard == "vocab" else sizes.vocab_size
    return merge(rule, [shard], sizes=replace(sizes, num_query_groups=sizes.num_query_groups // num_ranks, vocab_size=rows))


def own_range(rule: Rule, size: int, *, rank: int, num_ranks: int, sizes: Sizes) -> slice:
    """Where along `cut_dim` that which `rank` holds of one of the rule's Hugging Face tensors lies. `size`: of that axis."""
    padded = sizes.padded_vocab_size if rule.shard == "vocab" else size
    return slice(min(rank * padded // num_ranks, size), min((rank + 1) * padded // num_ranks, size))


def join(rule: Rule, parts: Sequence[Tensor], *, num_ranks: int, sizes: Sizes) -> Tensor:
    """The shard of one of `num_ranks` ranks, of its own ranges of the rule's Hugging Face tensors."""
    groups, rows = sizes.num_query_groups // num_ranks, sizes.padded_vocab_size // num_ranks
    return split(rule, parts, rank=0, num_ranks=1, sizes=replace(sizes, num_query_groups=groups, padded_vocab_size=rows))


def cut_dim(rule: Rule) -> int | None:
    """The axis of its Hugging Face tensors that tensor parallelism cuts into equal ranges; None: it does not."""
    if rule.shard == "replicated":
        return None
    return 1 if rule.shard in ("row", "alternating_columns") else 0


def _interleave(tensors: Sequence[Tensor], groups: int) -> Tensor:
    """q, k, v [heads * d, in] -> [groups * (queries per group + 2) * d, in], Megatron's order."""
    return torch.cat([t.reshape(groups, -1, *t.shape[1:]) for t in tensors], dim=1).reshape(-1, *tensors[0].shape[1:])


def _joined(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)


def _separate(whole: Tensor, groups: int, head_dim: int) -> list[Tensor]:
    per_group = whole.reshape(groups, -1, *whole.shape[1:])
    queries = per_group.shape[1] - 2 * head_dim
    return [part.reshape(-1, *whole.shape[1:]) for part in per_group.split([queries, head_dim, head_dim], dim=1)]


def _gate_up(alternating: Tensor, rank: int, num_ranks: int) -> Tensor:
    """Rows gate, up, gate, up, ... -> the gates of `rank`, then its ups."""
    return torch.cat([alternating[start::2].chunk(num_ranks)[rank] for start in (0, 1)])


def _alternate(shards: Sequence[Tensor]) -> Tensor:
    gate, up = (_joined(parts) for parts in zip(*(shard.chunk(2) for shard in shards), strict=True))
    return torch.stack([gate, up], dim=1).flatten(0, 1)


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


def _gates_apart(tensors: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
    """q of [heads * (d queries, d gates), in] -> [groups * (all queries, all gates), in]; k and v as they are."""
    q, k, v = tensors
    by_group = q.reshape(sizes.num_query_groups, -1, 2, sizes.head_dim, *q.shape[1:])
    return [by_group.transpose(1, 2).reshape(q.shape), k, v]


def _with_gates(tensors: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
    q, k, v = tensors
    by_group = q.reshape(sizes.num_query_groups, 2, -1, sizes.head_dim, *q.shape[1:])
    return [by_group.transpose(1, 2).reshape(q.shape), k, v]


def _delta_inputs(tensors: Sequence[Tensor], heads: DeltaSizes | None) -> Tensor:
    assert heads is not None
    parts = []
    for tensor, widths in zip(tensors, _widths_of_key_head(heads), strict=True):
        by_head = tensor.reshape(heads.keys, -1, *tensor.shape[1:])
        parts += [part.flatten(0, 1) for part in by_head.split(widths, dim=1)]
    return torch.cat(parts)


def _by_key_head(whole: Tensor, heads: DeltaSizes | None) -> list[Tensor]:
    assert heads is not None
    widths = _widths_of_key_head(heads)
    parts = iter(whole.split([heads.keys * width for each in widths for width in each]))
    joined = [torch.cat([next(parts).reshape(heads.keys, width, *whole.shape[1:]) for width in each], dim=1) for each in widths]
    return [tensor.flatten(0, 1) for tensor in joined]


def _widths_of_key_head(heads: DeltaSizes) -> tuple[list[int], list[int]]:
    """Rows of a key head in either tensor: query, key, values, output gates; strengths, decays."""
    shared = heads.values // heads.keys
    return [heads.key_dim, heads.key_dim, shared * heads.value_dim, shared * heads.value_dim], [shared, shared]
