"""Configurations (config.json) of models: of those that recipes are shipped for, as published, and of a run's, wherever it comes from.

Published ones are in configs/published, so that layouts can be checked before anything is fetched; without quantization_config, which
says how weights are stored and not what is computed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import moerl
from moerl.config.derive.model_shape import read_config, shape_of_config
from moerl.config.derive.scratch_config import scratch_config
from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ModelConfig
from moerl.config.schema.run_config import RunConfig
from moerl.models.find_family import find_family
from moerl.types.routes import RouteShape


def shipped_configs() -> Path:
    """configs/ of a checkout, or the copy inside an installed package."""
    package = Path(moerl.__file__).resolve().parent
    checkout = package.parent / "configs"
    return checkout if (checkout / "config.yaml").is_file() else package / "_configs"


def shipped_layouts() -> dict[str, Layout]:
    """Layouts of configs/layout by their names."""
    files = sorted((shipped_configs() / "layout").glob("*.yaml"))
    return {file.stem: Layout(**yaml.safe_load(file.read_text())) for file in files}


def published_names() -> list[str]:
    return sorted(file.stem for file in (shipped_configs() / "published").glob("*.json"))


def published_config(name: str) -> dict[str, Any]:
    """The config.json of one of `published_names`."""
    return json.loads((shipped_configs() / "published" / f"{name}.json").read_text())


def differences(published: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Where the architecture of `found`, a config.json of a family in moerl/models, is another one, as text for people."""
    expected, actual = _architecture(published), _architecture(found)
    names = sorted(expected.keys() | actual.keys())
    return [f"{name} {actual.get(name)!r}, not {expected.get(name)!r}" for name in names if actual.get(name) != expected.get(name)]


def _architecture(hf: Mapping[str, Any]) -> dict[str, Any]:
    """model_type and what its family tells Megatron."""
    family = find_family(hf)
    return {"model_type": hf["model_type"], "vocab_size": hf["vocab_size"], **family.rotary(hf), **family.transformer_config(hf)}


def model_config(model: ModelConfig) -> dict[str, Any]:
    """The config.json of a model that validation has accepted."""
    if model.scratch is not None:
        return scratch_config(model.scratch, model.max_context)
    return read_config(Path(model.path)) if model.path is not None else published_config(str(model.published))


def routes_to_replay(config: RunConfig) -> RouteShape | None:
    """Shape of the routes that completions of a valid configuration bring; None if it does not replay an engine's routes."""
    if config.train.router_replay != "rollout":
        return None
    return shape_of_config(model_config(config.model)).routes
