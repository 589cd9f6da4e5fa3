"""The rules of train.bridge: what an optional package must be, and what it can carry."""

import importlib.util
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from moerl.config.rules.facts import Facts
from moerl.config.schema.run_config import RunConfig
from moerl.models.bridge_packages import BRIDGES, BridgePackage
from moerl.types.errors import Problem, problem


def bridge_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Every rule of train.bridge that is broken, for the model if it is known."""
    train, hf = config.train, facts.hf
    if train.bridge == "native":
        return
    path, native, package = "train.bridge", "train.bridge=native", BRIDGES[train.bridge]
    if (fault := missing(package)) is not None:
        yield problem(path, train.bridge, f"needs {package.name} {package.version}", fault, f"{package.install}, or {native}")
    if hf is not None and hf["model_type"] not in package.families:
        reason = f"it is verified for {', '.join(package.families)} alone, and this model is {hf['model_type']}"
        yield problem(path, train.bridge, "must be native for this model", reason, native)
    if train.mtp_loss > 0:
        yield problem(path, train.bridge, "must be native while train.mtp_loss > 0", package.mtp_fault, f"{native}, or train.mtp_loss=0")
    layout = train.layout
    if train.bridge == "mbridge" and layout.ep == 1 and layout.etp != layout.tp and hf is not None and _has_experts(hf):
        reason = "without expert parallelism mbridge gathers experts over tensor parallelism, as if they were split there"
        fix = f"train.layout.etp={layout.tp}, train.layout.ep=2 or more, or {native}"
        yield problem(path, train.bridge, "needs train.layout.etp=train.layout.tp when ep=1", reason, fix)


def missing(package: BridgePackage) -> str | None:
    """Why it cannot be used here."""
    try:
        found = version(package.name)
    except PackageNotFoundError:
        return f"the package {package.name} is not installed here"
    absent = [module for module in package.modules if importlib.util.find_spec(module) is None]
    if absent:
        return f"the module {absent[0]}, which {package.name} needs, cannot be imported here"
    return None if found == package.version else f"version {found} is installed here, which moerl's patches were not written for"


def _has_experts(hf: Mapping[str, Any]) -> bool:
    return any(hf.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
