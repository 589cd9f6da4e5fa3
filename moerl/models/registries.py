"""Which architectures the packages of train.bridge know, read from their own registries without importing them.

Both register with a decorator of a class: importing them would import torch and Megatron, which validation does without.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from moerl.models.bridge_packages import BRIDGES, BridgePackage

_DECORATORS = ("register_model", "register_bridge")
"""Registries of mbridge, with model_types, and of Megatron-Bridge, with the name of a class of transformers as `source`."""


def explain_known(hf: Mapping[str, Any]) -> str:
    """Explanation for a config.json: what each package says of it, and what that is good for."""
    said = "; ".join(_explain(package, hf) for package in BRIDGES.values())
    return f"{said} (where one does, its map of names helps to write a family: train.bridge carries only models of families)"


def _explain(package: BridgePackage, hf: Mapping[str, Any]) -> str:
    try:
        installed, known = distribution(package.name).version, registered(package.name)
    except PackageNotFoundError:
        return f"{package.name}, which may know it, is not installed here: {package.install}"
    names = {hf.get("model_type"), *(hf.get("architectures") or [])}
    return f"{package.name} {installed} {'knows it' if names & known else 'does not know it'}"


@cache
def registered(package: str) -> frozenset[str]:
    """model_types and names of classes. Raises PackageNotFoundError."""
    files = [Path(str(file.locate())) for file in distribution(package).files or [] if file.suffix == ".py"]
    return frozenset(name for file in files if file.is_file() for name in _registered_in(file.read_text()))


def _registered_in(source: str) -> Iterator[str]:
    if not any(name in source for name in _DECORATORS):
        return
    for node in ast.walk(ast.parse(source)):
        for call in node.decorator_list if isinstance(node, ast.ClassDef) else []:
            if isinstance(call, ast.Call) and _last_name(call.func) in _DECORATORS:
                named = [keyword.value for keyword in call.keywords if keyword.arg == "source"]
                yield from (name for value in (*call.args, *named) for name in _names(value))


def _names(value: ast.expr) -> list[str]:
    if isinstance(value, ast.Constant):
        return [str(value.value)]
    if isinstance(value, ast.List | ast.Tuple):
        return [name for element in value.elts for name in _names(element)]
    return [_last_name(value)]


def _last_name(value: ast.expr) -> str:
    return ast.unparse(value).rpartition(".")[2]
