"""The few sizes of a model that validation needs, by its family's description of config.json (moerl/models)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.models.families.parts.config_fields import num_mtp_layers
from moerl.models.find_family import find_family
from moerl.types.routes import RouteShape


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    max_positions: int
    num_experts: int | None
    """None for a dense model."""
    expert_ffn_size: int
    """0 for a dense model."""
    num_mtp_layers: int = 0
    """Layers of multi-token prediction, which are not among `num_layers`."""
    routes: RouteShape | None = None
    """None for a dense model."""
    has_expert_bias: bool = False
    """Its routers choose experts with a correction bias."""
    has_latent_attention: bool = False
    dense_ffn_size: int = 0
    """Inner size of its dense MLPs; 0: it has none."""
    shared_ffn_size: int = 0
    """Inner size of the experts of every token, together; 0: it has none."""
    has_biased_experts: bool = False
    """The projections of its experts have biases."""
    has_sinks: bool = False
    """Its attention has a learned sink for each head."""
    has_index: bool = False
    """Each layer chooses the positions that a query attends to."""
    delta_heads: int | None = None
    """Key heads of gated delta nets; None: it has none."""

    @property
    def has_shared_experts(self) -> bool:
        return self.shared_ffn_size > 0


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """Shape of a model of a family in moerl/models, whether or not it breaks a rule of its family. KeyError for what config.json lacks."""
    megatron = find_family(config).transformer_config(config)
    num_experts = megatron.get("num_moe_experts")
    layers = megatron.get("moe_layer_freq")
    has_dense = num_experts is None or (isinstance(layers, list) and 0 in layers)
    return ModelShape(
        model_type=config["model_type"],
        num_layers=megatron["num_layers"],
        num_heads=megatron["num_attention_heads"],
        num_kv_heads=megatron.get("num_query_groups", megatron["num_attention_heads"]),
        max_positions=config["max_position_embeddings"],
        num_experts=num_experts,
        expert_ffn_size=megatron.get("moe_ffn_hidden_size", 0),
        num_mtp_layers=num_mtp_layers(config),
        routes=None if num_experts is None else _routes(megatron, num_experts),
        has_expert_bias=megatron.get("moe_router_enable_expert_bias", False),
        has_latent_attention=megatron.get("multi_latent_attention", False),
        dense_ffn_size=megatron["ffn_hidden_size"] if has_dense else 0,
        shared_ffn_size=megatron.get("moe_shared_expert_intermediate_size") or 0,
        has_biased_experts=num_experts is not None and megatron["add_bias_linear"],
        has_sinks=megatron.get("softmax_type") == "learnable",
        has_index=megatron.get("experimental_attention_variant") == "dsa",
        delta_heads=megatron.get("linear_num_key_heads"),
    )


def _routes(megatron: Mapping[str, Any], num_experts: int) -> RouteShape:
    layers = megatron["moe_layer_freq"]
    num_layers = sum(layers) if isinstance(layers, list) else megatron["num_layers"]
    return RouteShape(num_layers=num_layers, top_k=megatron["moe_router_topk"], num_experts=num_experts)


def read_config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())
