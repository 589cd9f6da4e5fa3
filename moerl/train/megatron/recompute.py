"""Megatron's fields for the activations that are computed again in the backward pass."""

from typing import Any

from moerl.config.schema.memory_config import FullRecompute, NoRecompute, Recompute


def recompute_fields(recompute: Recompute) -> dict[str, Any]:
    """Keyword arguments of TransformerConfig."""
    if isinstance(recompute, NoRecompute):
        return {}
    if isinstance(recompute, FullRecompute):
        return {"recompute_granularity": "full", "recompute_method": recompute.method, "recompute_num_layers": recompute.num_layers}
    return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
