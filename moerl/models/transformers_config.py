"""A checkpoint's config.json as transformers reads it, also where its model_type is one that transformers computes under another name."""

import json
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from moerl.models.unknown import find_family


def read_transformers_config(model_dir: Path) -> PretrainedConfig:
    """Configuration of the class that computes the model, which is transformers' own: code that the folder names (auto_map) is not run.
    Raises CheckpointError for a model without a family in moerl/models."""
    written = json.loads((model_dir / "config.json").read_text())
    computed_as = find_family(written).served.computed_as
    if computed_as is not None:
        return AutoConfig.for_model(**written | {"model_type": computed_as})
    return AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
