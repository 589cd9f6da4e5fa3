"""Names and shapes of the Hugging Face tensors of a config.json, from the configuration alone: no model is built."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moerl.convert.sharded.parameters import built_shapes, sizes_of
from moerl.models.families.parts.config_fields import num_mtp_layers
from moerl.models.families.parts.family import Family
from moerl.models.parameter_shapes import Shape, places
from moerl.models.shards import merge


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    shapes: Mapping[str, Shape]
    """Shape of every tensor that the model has, by its Hugging Face name, layers of multi-token prediction included."""
    copies: Mapping[str, Shape]
    """Shapes of tensors that a checkpoint may repeat there."""


def expected_tensors(family: Family, config: Mapping[str, Any]) -> ExpectedTensor:
    """Tensors of a config.json that breaks no rule of its family."""
    sizes, fields, num_mtp = sizes_of(family, config), family.transformer_config(config), num_mtp_layers(config)
    shapes: dict[str, Shape] = {}
    copies: dict[str, Shape] = {}
    for rule, held in built_shapes(family, config).items():
        merged = [tuple(part.shape) for part in merge(rule, [torch.empty(held, device="meta")], sizes=sizes)]
        for numbers in places(rule, fields, num_mtp):
            shapes |= zip(rule.hf_names(numbers, sizes.num_layers), merged, strict=True)
        copies |= {copy.format(mtp=sizes.num_layers + index): merged[0] for copy in rule.copies for index in range(num_mtp)}
    return ExpectedTensor(shapes=shapes, copies=copies)
