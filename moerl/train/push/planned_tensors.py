"""The tensors of a run's pushes, for whoever plans them: from the rules of the model's family, without Megatron. Tests hold them equal to
those that a run's ranks say they have."""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch

from moerl.config.derive.model_configs import model_config
from moerl.config.derive.pipeline import layer_ranges
from moerl.config.schema.layout import Layout
from moerl.config.schema.run_config import RunConfig
from moerl.models.families.parts.config_fields import is_tied, num_mtp_layers
from moerl.models.find_family import find_family
from moerl.models.parameter_shapes import parameter_shapes, places
from moerl.models.shards import Sizes, cut_dim, merge
from moerl.types.push import TensorSpec
from moerl.weights.plan.fp8_pairs import with_scales
from moerl.weights.plan.transfer_plan import PlannedTensor

_BEFORE = -1
"""Place of the embedding among the layers; the last norm, the output layer and multi-token prediction come after all."""


def push_tensors(config: RunConfig) -> list[PlannedTensor]:
    tensors = tensors_to_push(model_config(config.model), config.train.layout, dtype=config.rollout_dtype, with_mtp=config.pushes_mtp)
    return with_scales(tensors) if config.rollout.layout.weights == "fp8" else tensors


def tensors_to_push(hf: Mapping[str, Any], layout: Layout, *, dtype: str, with_mtp: bool = False) -> list[PlannedTensor]:
    """Every tensor of a push by the pipeline stage that holds it, layer by layer. `dtype`: of the rollout. `with_mtp`: and those of
    multi-token prediction."""
    family = find_family(hf)
    fields = family.transformer_config(hf)
    num_layers, sizes = fields["num_layers"], Sizes.of(fields, vocab_size=hf["vocab_size"])
    places_of_layers = enumerate(layer_ranges(layout, num_layers))
    stages = {layer: stage for stage, chunks in places_of_layers for layers in chunks for layer in layers}
    stages |= {_BEFORE: 0, num_layers: layout.pp - 1}
    found = []
    for rule, shape in parameter_shapes(family, fields, vocab_size=hf["vocab_size"], tied=is_tied(hf)).items():
        wholes = merge(rule, [torch.empty(shape, device="meta")], sizes=sizes)
        for numbers in places(rule, fields, num_mtp_layers(hf) if with_mtp else 0):
            layer = numbers.get("layer", _BEFORE if rule.megatron.startswith("embedding.") else num_layers)
            for name, whole in zip(rule.hf_names(numbers, num_layers), wholes, strict=True):
                spec = TensorSpec(name=name, shape=tuple(whole.shape), dtype="float32" if rule.is_float32 else dtype)
                tensor = PlannedTensor(spec=spec, stage=stages[layer], expert=numbers.get("expert"), cut_dim=cut_dim(rule))
                found.append((layer, tensor))
    return [tensor for _, tensor in sorted(found, key=itemgetter(0))]
