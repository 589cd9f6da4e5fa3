"""A checkpoint's config.json as transformers reads it, also where its model_type is one that transformers computes under another name."""

import json
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from moerl.models.unknown import find_family


def read_transformers_config(model_dir: Path) -> PretrainedConfig:
    """Configuration of the class that computes the model. Raises CheckpointError for a model without a family in moerl/models."""
    written = json.loads((model_dir / "config.json").read_text())
    computed_as = find_family(written).served.computed_as
    return AutoConfig.from_pretrained(model_dir) if computed_as is None else AutoConfig.for_model(**written | {"model_type": computed_as})
