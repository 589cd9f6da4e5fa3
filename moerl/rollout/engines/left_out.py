"""What transformers takes for granted and leaves out of the config.json it writes, where engines take something else for granted."""

from collections.abc import Mapping
from typing import Any

_DEFAULTS = {"deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}}
"""By model_type. Without the last two an engine takes a softmax router without a bias."""


def left_out(model: Mapping[str, Any]) -> dict[str, Any]:
    """To be added to the model's configuration."""
    return {name: value for name, value in _DEFAULTS.get(model["model_type"], {}).items() if name not in model}
