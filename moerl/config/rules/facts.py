"""Facts of a run's model: its config.json, the sizes that rules ask for, and what is wrong with its directory. Read once for all rules."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.config.derive.model_configs import model_config, published_names
from moerl.config.derive.model_shape import ModelShape, shape_of_config
from moerl.config.rules.checkpoint_files import checkpoint_problems
from moerl.config.schema.model_config import ModelConfig
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Facts:
    hf: Mapping[str, Any] | None
    """The config.json; None where a rule of `model` says why there is none."""
    shape: ModelShape | None
    """Its sizes; None with `hf`."""
    faults: tuple[Problem, ...] = ()
    """Faults of the directory model.path."""


Rule = Callable[[RunConfig, Facts], Iterator[Problem]]
"""Problems of a configuration that satisfies the schema."""


def facts_of(model: ModelConfig) -> Facts:
    faults = () if model.path is None else tuple(checkpoint_problems(Path(model.path)))
    is_there = model.published in published_names() if model.path is None else not faults
    hf = model_config(model) if model.scratch is not None or is_there else None
    return Facts(hf=hf, shape=None if hf is None else shape_of_config(hf), faults=faults)
