"""Names and shapes of the Hugging Face tensors of a config.json, from the configuration alone: no model is built."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moerl.convert.sharded.parameters import fields_of, num_experts, sizes_of
from moerl.models.families.parts.config_fields import is_tied, num_mtp_layers
from moerl.models.families.parts.family import Family, Rule
from moerl.models.parameter_shapes import Shape, layer_kind, parameter_shapes
from moerl.models.shards import merge


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    shapes: Mapping[str, Shape]
    """Shape of every tensor that the model has, by its Hugging Face name, layers of multi-token prediction included."""
    copies: Mapping[str, Shape]
    """Shapes of tensors that a checkpoint may repeat there."""


def expected_tensors(family: Family, config: Mapping[str, Any]) -> ExpectedTensor:
    """Tensors of a config.json that breaks no rule of its family."""
    sizes, num_mtp = sizes_of(family, config), num_mtp_layers(config)
    shapes: dict[str, Shape] = {}
    copies: dict[str, Shape] = {}
    for rule, held in built_shapes(family, config).items():
        merged = [tuple(part.shape) for part in merge(rule, [torch.empty(held, device="meta")], sizes=sizes)]
        for name, shape in zip(rule.hf, merged, strict=True):
            shapes |= {name.format(**numbers): shape for numbers in _places(rule, family, config)}
        copies |= {copy.format(mtp=sizes.num_layers + index): merged[0] for copy in rule.copies for index in range(num_mtp)}
    return ExpectedTensor(shapes=shapes, copies=copies)


def built_shapes(family: Family, config: Mapping[str, Any]) -> dict[Rule, Shape]:
    """Shapes of Megatron's parameters on one rank, without padding of the vocabulary."""
    return parameter_shapes(family, fields_of(family, config), vocab_size=config["vocab_size"], tied=is_tied(config))


def _places(rule: Rule, family: Family, config: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Values that {layer}, {mtp} and {expert} of its Hugging Face names are."""
    if "{layer}" not in rule.megatron and not rule.is_mtp:
        yield {}
        return
    fields = fields_of(family, config)
    for layer in range(fields["num_layers"] + num_mtp_layers(config)):
        if layer_kind(fields, layer).has(rule):
            for expert in range(num_experts(family, config) if rule.is_expert else 1):
                yield {"layer": layer, "mtp": layer, "expert": expert}
