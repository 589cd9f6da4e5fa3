"""Packages that may carry weights in place of the native bridge, as train.bridge names them; which architectures their registries know."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgePackage:
    """A package that carries weights in place of the native bridge."""

    name: str
    version: str
    """The only one moerl's patches were written for."""
    modules: tuple[str, ...]
    """Modules that must be importable: its own, and what it imports beyond the requirements of moerl."""
    install: str
    families: tuple[str, ...]
    """model_types whose weights it carries without a difference from the native bridge (tests/models)."""
    mtp_fault: str
    """Why it does not carry layers of multi-token prediction that are trained."""


BRIDGES: Mapping[str, BridgePackage] = {
    "mbridge": BridgePackage(
        name="mbridge",
        version="0.15.1",
        modules=("mbridge",),
        install="pip install 'moerl[mbridge]'",
        families=("qwen2", "qwen3", "qwen3_moe", "llama", "mixtral", "deepseek_v3"),
        mtp_fault="mbridge names layers of multi-token prediction only in a model of 61 layers with one of them",
    ),
    "megatron_bridge": BridgePackage(
        name="megatron-bridge",
        version="0.3.1",
        modules=("megatron.bridge", "triton"),
        # It declares transformers < 5 and packages for GPUs that carrying weights does not import.
        install="pip install --no-deps megatron-bridge==0.3.1 triton",
        families=("qwen2", "qwen3", "qwen3_moe", "llama", "deepseek_v3", "kimi_k2", "glm4_moe"),
        mtp_fault="megatron-bridge 0.3.1 has no mapping of DeepSeek's layers of multi-token prediction, and that of GLM is not verified",
    ),
}


_DECORATORS = ("register_model", "register_bridge")
"""Registries of mbridge, with model_types, and of Megatron-Bridge, with the name of a class of transformers as `source`."""


def explain_known(hf: Mapping[str, Any]) -> str:
    """Explanation for a config.json: what each package says of it, and what that is good for."""
    said = "; ".join(_explain(package, hf) for package in BRIDGES.values())
    return f"{said} (what megatron-bridge knows, train.bridge=megatron_bridge may open: docs/add-a-family.md)"


def _explain(package: BridgePackage, hf: Mapping[str, Any]) -> str:
    try:
        return f"{package.name} {distribution(package.name).version} {'knows it' if knows(package, hf) else 'does not know it'}"
    except PackageNotFoundError:
        return f"{package.name}, which may know it, is not installed here: {package.install}"


def knows(package: BridgePackage, hf: Mapping[str, Any]) -> bool:
    """Whether its registry has the architecture of a config.json. False where it is not installed."""
    listed = hf.get("architectures")
    names = {each for each in (hf.get("model_type"), *(listed if isinstance(listed, list) else ())) if isinstance(each, str)}
    try:
        return bool(names & registered(package.name))
    except PackageNotFoundError:
        return False


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
