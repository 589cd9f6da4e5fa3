"""The packages that may carry weights in place of the native bridge, as train.bridge names them."""

from collections.abc import Mapping
from dataclasses import dataclass


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
