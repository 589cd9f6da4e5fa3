"""The config.json of a run's model, wherever it comes from."""

from pathlib import Path
from typing import Any

from moerl.config.derive.model_shape import read_config
from moerl.config.derive.published import published_config
from moerl.config.derive.scratch_config import scratch_config
from moerl.config.schema.model_config import ModelConfig


def model_config(model: ModelConfig) -> dict[str, Any]:
    """The config.json of a model that validation has accepted."""
    if model.scratch is not None:
        return scratch_config(model.scratch, model.max_context)
    return read_config(Path(model.path)) if model.path is not None else published_config(str(model.published))
