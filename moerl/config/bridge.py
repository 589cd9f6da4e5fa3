"""The rules of train.bridge: what an optional package must be, and what it can carry."""

import importlib.util
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from moerl.config.problems import problem
from moerl.config.schema import TrainConfig
from moerl.types import Problem

MBRIDGE_VERSION = "0.15.1"
MBRIDGE_FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mixtral", "deepseek_v3")
"""Those whose weights it carries without a difference from the native bridge (tests/models/test_mbridge.py)."""


def bridge_problems(train: TrainConfig, hf: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Every broken rule, for the model of the config.json `hf` if it is known."""
    if train.bridge == "native":
        return
    path, native = "train.bridge", "train.bridge=native"
    if (fault := _missing()) is not None:
        yield problem(path, train.bridge, f"needs mbridge {MBRIDGE_VERSION}", fault, f"pip install 'moerl[mbridge]', or {native}")
    if hf is not None and hf["model_type"] not in MBRIDGE_FAMILIES:
        reason = f"it is verified for {', '.join(MBRIDGE_FAMILIES)} alone, and this model is {hf['model_type']}"
        yield problem(path, train.bridge, "must be native for this model", reason, native)
    if train.mtp_loss > 0:
        reason = "mbridge names layers of multi-token prediction only in a model of 61 layers with one of them"
        yield problem(path, train.bridge, "must be native while train.mtp_loss > 0", reason, f"{native}, or train.mtp_loss=0")
    layout = train.layout
    if layout.ep == 1 and layout.etp != layout.tp and hf is not None and _has_experts(hf):
        reason = "without expert parallelism mbridge gathers experts over tensor parallelism, as if they were split there"
        fix = f"train.layout.etp={layout.tp}, train.layout.ep=2 or more, or {native}"
        yield problem(path, train.bridge, "needs train.layout.etp=train.layout.tp when ep=1", reason, fix)


def _has_experts(hf: Mapping[str, Any]) -> bool:
    return any(hf.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _missing() -> str | None:
    try:
        found = version("mbridge")
    except PackageNotFoundError:
        return "the package mbridge is not installed here"
    if importlib.util.find_spec("mbridge") is None:
        return "the package mbridge cannot be imported here"
    return None if found == MBRIDGE_VERSION else f"version {found} is installed here, which moerl's patches were not written for"
