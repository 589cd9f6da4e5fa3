"""The few sizes of a model that validation needs, read from a Hugging Face config.json without importing transformers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.types import RouteShape


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

    @property
    def has_expert_bias(self) -> bool:
        return self.model_type == "deepseek_v3"


def shape_of_config(config: dict[str, Any]) -> ModelShape:
    """Names as in the config.json of Qwen3, Qwen3-MoE and DeepSeek-V3 (transformers, models/*/configuration_*.py)."""
    # transformers 5 saves Qwen3-MoE under the second name; published checkpoints have the first. The third is DeepSeek's.
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((config[name] for name in names if name in config), None)
    num_mtp_layers = config.get("num_nextn_predict_layers")
    return ModelShape(
        model_type=config["model_type"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        max_positions=config["max_position_embeddings"],
        num_experts=num_experts,
        expert_ffn_size=config["moe_intermediate_size"] if num_experts is not None else 0,
        num_mtp_layers=0 if num_mtp_layers is None else num_mtp_layers,
        routes=None if num_experts is None else _routes(config, num_experts),
    )


def _routes(config: dict[str, Any], num_experts: int) -> RouteShape:
    num_layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    return RouteShape(num_layers=num_layers, top_k=config["num_experts_per_tok"], num_experts=num_experts)


def read_config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())
