"""A checkpoint's config.json as transformers reads it, also where its model_type is one that transformers computes under another name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from moerl.models.find_family import find_family, is_native


def read_transformers_config(model_dir: Path) -> PretrainedConfig:
    """Configuration of the class that computes the model, which is transformers' own: code that the folder names (auto_map) is not run.
    Raises CheckpointError for a model without a family in moerl/models."""
    written = json.loads((model_dir / "config.json").read_text())
    computed_as = find_family(written).served.computed_as
    if computed_as is not None:
        return AutoConfig.for_model(**written | {"model_type": computed_as})
    return AutoConfig.from_pretrained(model_dir, trust_remote_code=False)


def written_config(config: PretrainedConfig) -> Mapping[str, Any]:
    """A config.json for `find_family`: of a family that was opened the very one it was opened for."""
    named = config.to_dict()
    if is_native(named):
        return named
    written: dict[str, Any] = json.loads((Path(config.name_or_path) / "config.json").read_text())
    return written
