"""train.fp8 for Megatron: the fields of its TransformerConfig, and whether this GPU can run the recipe."""

from typing import Any

import torch

from megatron_patches import reference_te
from moerl.config.schema.train_config import FP8Config
from moerl.types.errors import ConfigError, problem

Version = tuple[int, int]

_NEEDS: dict[str, tuple[Version, Version, str]] = {
    "blockwise": ((9, 0), (12, 9), "Hopper's matrix units scale blocks of 128, from CUDA 12.9 on"),
    "mxfp8": ((10, 0), (12, 8), "Blackwell's matrix units scale groups of 32"),
    "tensorwise": ((8, 9), (12, 1), "FP8 matrix units came with Ada and Hopper"),
    "delayed": ((8, 9), (12, 1), "FP8 matrix units came with Ada and Hopper"),
}
"""Compute capability and CUDA version (transformer_engine/pytorch/quantization.py, _compute_*_support)."""

_WITHOUT_MXFP8: Version = (12, 0)
"""Compute capability from which on Transformer Engine has not all of its products: Blackwell of workstations."""


def megatron_fields(fp8: FP8Config | None) -> dict[str, Any]:
    if fp8 is None:
        return {}
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "first_last_layers_bf16": fp8.first_layers_bf16 + fp8.last_layers_bf16 > 0,
        "num_layers_at_start_in_bf16": fp8.first_layers_bf16,
        "num_layers_at_end_in_bf16": fp8.last_layers_bf16,
    }


def require_device(fp8: FP8Config | None) -> None:
    """Raises ConfigError if Transformer Engine would refuse the recipe on this GPU. The reference emulates every recipe anywhere."""
    if fp8 is not None and torch.cuda.is_available() and not reference_te.active():
        major, minor = str(torch.version.cuda).split(".")[:2]
        require(fp8.recipe, capability=torch.cuda.get_device_capability(), cuda=(int(major), int(minor)))


def require(recipe: str, *, capability: Version, cuda: Version) -> None:
    needed_capability, needed_cuda, reason = _NEEDS[recipe]
    problems = []
    if recipe == "mxfp8" and capability >= _WITHOUT_MXFP8:
        rule = f"needs a GPU of compute capability below {_dotted(_WITHOUT_MXFP8)}; this one has {_dotted(capability)}"
        reason = "Transformer Engine has not all of its products there"
        problems.append(problem("train.fp8.recipe", recipe, rule, reason, "train.fp8.recipe=tensorwise, train.fp8=null"))
    if capability < needed_capability:
        has = f"this one has {_dotted(capability)}"
        rule = f"needs a GPU of compute capability {_dotted(needed_capability)} or higher; {has}"
        fits = [f"train.fp8.recipe={name}" for name, (lowest, _, _) in _NEEDS.items() if lowest <= capability]
        problems.append(problem("train.fp8.recipe", recipe, rule, reason, ", ".join([*fits, "train.fp8=null"])))
    if cuda < needed_cuda:
        rule = f"needs CUDA {_dotted(needed_cuda)} or newer; PyTorch was built with {_dotted(cuda)}"
        problems.append(problem("train.fp8.recipe", recipe, rule, reason, "a PyTorch for a newer CUDA, or train.fp8=null"))
    if problems:
        raise ConfigError(problems)


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
