"""Keys and values of many sequences at different positions, and attention over them.

Every running request owns one slot. A forward pass names its rows: which slots, and at which positions they write. Writes that belong
to nobody (padding) go to the scratch column, the last one, which no query ever sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from moerl.models.families.qwen3_next import LINEAR

ATTENTION = "moerl_slots"
"""The name under which `attend` is registered with transformers."""

COLUMN_MULTIPLE = 16
"""Step of the number of columns that queries see: whole SIMD vectors in the attention kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Tensors that one forward pass reads and writes. B rows, C tokens each."""

    slots: torch.Tensor  # int64 [B]; the cache's `all_slots` itself where row i is slot i
    write_at: torch.Tensor  # int64 [B, C]
    kv_length: int
    """Columns that some row reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRun:
    """Rows `first` to `end` (not included) of a pass, whose queries read the first `kv_length` columns; some may be padding."""

    first: int
    end: int
    kv_length: int


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [num_slots, kv_heads, num_columns, head_dim] each, with a head_dim of its own each, and the keys
    [num_slots, num_columns, index_dim] of its indexer, if it has one (else of no width)."""

    def __init__(self, shape: tuple[int, int, int], head_dims: tuple[int, int], index_dim: int, dtype: torch.dtype, cache: "SlotCache"):
        super().__init__()
        self.keys, self.values = (torch.zeros((*shape, head_dim), dtype=dtype) for head_dim in head_dims)
        self.index_keys = torch.zeros((shape[0], shape[2], index_dim), dtype=dtype)
        self.cache = cache
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [B, kv_heads, C, head_dim] at the pass's rows; returns [B, kv_heads, kv_length, head_dim] of both."""
        rows = self.cache.rows
        self.keys[rows.slots[:, None], :, rows.write_at] = key_states.transpose(1, 2)
        self.values[rows.slots[:, None], :, rows.write_at] = value_states.transpose(1, 2)
        keys, values = self.keys[:, :, : rows.kv_length], self.values[:, :, : rows.kv_length]
        return (keys, values) if rows.slots is self.cache.all_slots else (keys[rows.slots], values[rows.slots])

    def update_indexer(self, index_keys: torch.Tensor) -> torch.Tensor:
        """Store [B, C, index_dim] at the pass's rows; returns [B, kv_length, index_dim]."""
        rows = self.cache.rows
        self.index_keys[rows.slots[:, None], rows.write_at] = index_keys
        return self.index_keys[rows.slots, : rows.kv_length]

    def clear(self, slots: torch.Tensor) -> None:
        for held in (self.keys, self.values, self.index_keys):
            if len(slots) == len(held):  # as at the beginning of a step; five times as fast
                held.zero_()
            else:
                held[slots] = 0

    def copy(self, source: int, targets: torch.Tensor, length: int) -> None:
        self.keys[targets, :, :length] = self.keys[source, :, :length]
        self.values[targets, :, :length] = self.values[source, :, :length]
        self.index_keys[targets, :length] = self.index_keys[source, :length]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("slots are allocated when the server starts")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        raise AssertionError("slots have different lengths; every pass gives position_ids")

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class DeltaLayer:
    """Memory of a gated delta net (delta_net.py), whose size does not grow with positions."""

    def __init__(self, config: PretrainedConfig, num_slots: int, dtype: torch.dtype):
        keys, values = config.linear_num_key_heads * config.linear_key_head_dim, config.linear_num_value_heads
        channels = 2 * keys + values * config.linear_value_head_dim
        self.inputs = torch.zeros((num_slots, channels, config.linear_conv_kernel_dim - 1), dtype=dtype)
        """The last ones of the convolution."""
        self.state = torch.zeros((num_slots, values, config.linear_key_head_dim, config.linear_value_head_dim))

    def clear(self, slots: torch.Tensor) -> None:
        self.inputs[slots] = 0
        self.state[slots] = 0

    def copy(self, source: int, targets: torch.Tensor, length: int) -> None:
        self.inputs[targets] = self.inputs[source]
        self.state[targets] = self.state[source]


class SlotCache(Cache):
    """Cache that transformers models write to and read from, as their `past_key_values`."""

    rows: Rows
    """Those of the pass under way."""

    def __init__(self, config: PretrainedConfig, *, num_slots: int, max_context: int, dtype: torch.dtype):
        self.scratch_column = -(-max_context // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        kv_heads, head_dims = _cached_heads(config)
        shape = (num_slots, kv_heads, self.scratch_column + 1)
        self.num_slots, self.all_slots = num_slots, torch.arange(num_slots)
        index_dim, kinds = getattr(config, "index_head_dim", 0), getattr(config, "layer_types", None) or ()
        layers = [
            DeltaLayer(config, num_slots, dtype)
            if layer < len(kinds) and kinds[layer] == LINEAR
            else SlotLayer(shape, head_dims, index_dim, dtype, self)
            for layer in range(config.num_hidden_layers)
        ]
        super().__init__(layers=layers)

    def clear(self, slots: torch.Tensor) -> None:
        """Masked columns count with weight 0, and 0 times an old NaN would still be NaN."""
        for layer in self.layers:
            layer.clear(slots)

    def copy(self, source: int, targets: torch.Tensor, length: int) -> None:
        """The first `length` positions of slot `source`, which has no others, into each of `targets`."""
        for layer in self.layers:
            layer.copy(source, targets, length)


def _cached_heads(config: PretrainedConfig) -> tuple[int, tuple[int, int]]:
    """Heads, and the widths of what transformers caches as keys and as values.

    Latent attention (DeepSeek-V3) caches, as one head, the latents from which it makes keys and values, and the keys' rotary part.
    """
    if getattr(config, "kv_lora_rank", None) is not None:
        return 1, (config.kv_lora_rank, config.qk_rope_head_dim)
    given = getattr(config, "head_dim", None)
    head_dim = config.hidden_size // config.num_attention_heads if given is None else given
    return config.num_key_value_heads, (head_dim, head_dim)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    key_runs: Sequence[KeyRun] = (),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention that reads keys and values where they lie.

    query [B, heads, C, D], key [B, kv_heads, S, D], value [B, kv_heads, S, D of its own], mask [B, 1, heads / kv_heads * C, S]: the
    query heads that share a key/value head are laid along the query axis, so that keys and values need no repetition. s_aux [heads]:
    logits of sinks, which every query sees and which have no value. indices [B, C, k], of as many key/value heads as heads: the keys
    that a query may see. key_runs: rows that are no padding, and what they read where it is less than S; the others' result is 0.
    """
    batch, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    if indices is not None:
        others = torch.ones_like(attention_mask[:, 0], dtype=torch.bool).scatter(-1, indices.long(), False)
        attention_mask = attention_mask.masked_fill(others[:, None], -torch.inf)
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * tokens, dim)
    sinks = None if s_aux is None else s_aux.reshape(1, kv_heads, -1, 1).repeat_interleave(tokens, dim=2)
    out = value.new_zeros(batch, kv_heads, grouped.shape[2], value.shape[-1])
    for run in key_runs or [KeyRun(first=0, end=batch, kv_length=key.shape[2])]:
        rows, seen = slice(run.first, run.end), slice(run.kv_length)
        out[rows] = _attention(grouped[rows], key[rows, :, seen], value[rows, :, seen], attention_mask[rows, ..., seen], sinks, scaling)
    return out.reshape(batch, heads, tokens, value.shape[-1]).transpose(1, 2), None


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """[B, kv_heads, queries of a head, D of the values]; sinks [1, kv_heads, queries of a head, 1]."""
    if sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    logits = query @ key.transpose(2, 3) * scaling + mask
    scores = torch.cat([logits, sinks.expand(len(query), -1, -1, -1)], dim=-1).float()
    return scores.softmax(dim=-1)[..., :-1].to(value.dtype) @ value
