"""Declaration of a model family: its Megatron configuration, what it refuses, and how every parameter maps to Hugging Face tensors.

Data and functions of config.json alone: neither torch nor Megatron is imported, so that validation reads what the engine reads.
One rule serves both directions (shards.py).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

from moerl.types.errors import CheckpointError

Shard = Literal[
    "replicated", "column", "row", "vocab", "qkv", "gate_up", "alternating", "alternating_columns", "transposed_row",
    "gated_qkv", "delta_inputs",
]  # fmt: skip
"""Over tensor parallel (expert tensor parallel for experts). column: rows of the [out, in] weight. row: its columns. vocab: column,
after padding the vocabulary. qkv: column over query groups, each holding its queries, key and value. gate_up: both column.

alternating: gate_up of one tensor whose rows alternate, gate, up, gate, up. alternating_columns: the same of a [in, out] weight.
transposed_row: row of a [in, out] weight.

gated_qkv: qkv where each head's queries are followed by as many gates in checkpoints, and a group's queries by its gates in Megatron.
delta_inputs: of a gated delta net, on one rank: queries, keys, values, output gates, strengths and decays of all heads in Megatron; in
checkpoints the first four by key head, and the last two likewise in a second tensor."""


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

    def hf_names(self, numbers: Mapping[str, int], num_layers: int) -> tuple[str, ...]:
        """Names of `hf` in a model of `num_layers`, for the numbers that Megatron's name has."""
        counted = {**numbers, "mtp": numbers["mtp"] + num_layers} if self.is_mtp else numbers
        return tuple(name.format(**counted) for name in self.hf)


class BrokenRule(NamedTuple):
    """Why Megatron would not compute what a config.json says."""

    rule: str
    reason: str
    fix: str
    """Text to write, or model to use, instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Facts of a family that the hf engine needs beside its rules: how transformers names what checkpoints name otherwise."""

    computed_as: str | None = None
    """model_type of the transformers class that computes it; None: its own."""
    block: str = "mlp"
    """Name of a layer's experts and router in checkpoints; transformers calls them mlp."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's tensors, in checkpoints; transformers fuses them over all experts."""
    router: str = "gate"
    """Its name in transformers."""
    has_stacks: bool = False
    """Checkpoints hold the experts of a layer as transformers does, in stacks (stacks.py)."""
    has_windows: bool = False
    """Some layers see sliding_window positions only, by layer_types."""
    has_index: bool = False
    """Each layer chooses the index_topk positions that a query sees (DeepSeek-V3.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    rules: tuple[Rule, ...]
    transformer_config: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From config.json to the keyword arguments of Megatron's TransformerConfig that describe the architecture (with
    multi_latent_attention: of its MLATransformerConfig)."""
    broken_rules: Callable[[Mapping[str, Any]], Iterator[BrokenRule]]
    """Broken rules of a config.json: what it says that Megatron would compute otherwise."""
    rotary: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From config.json to the arguments of Megatron's GPTModel that describe its rotary embedding."""
    served: Served = field(default_factory=Served)
    left_out: tuple[str, ...] = ()
    """Beginnings of names in published checkpoints whose tensors no model is built with here."""

    def checked_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """`transformer_config`. Raises CheckpointError naming every rule that config.json breaks."""
        if broken := list(self.broken_rules(hf)):
            raise CheckpointError("config.json: " + "; ".join(f"{rule} ({reason})" for rule, reason, _ in broken))
        return self.transformer_config(hf)

    def find(self, name: str) -> tuple[Rule, dict[str, int]]:
        """The rule of a parameter by its global Megatron name, and its {layer}, {expert} and {mtp}. KeyError if none matches."""
        for rule in self.rules:
            match = pattern_of(rule.megatron).fullmatch(name)
            if match:
                return rule, {key: int(value) for key, value in match.groupdict().items()}
        raise KeyError(f"no rule maps the Megatron parameter {name}; add one to its family in moerl/models")


@cache
def pattern_of(template: str) -> re.Pattern[str]:
    """Pattern of the names that a template with {layer}, {expert} and {mtp} stands for, with groups of these names."""
    return re.compile(re.sub(r"\\{(layer|expert|mtp)\\}", r"(?P<\1>[0-9]{1,9})", re.escape(template)))
