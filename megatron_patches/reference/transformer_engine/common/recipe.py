"""FP8 recipes, with the constructor arguments Megatron-Core passes: how tensors are cut into blocks and what their scales may be.

Semantics: Transformer Engine, common/recipe/__init__.py. Delayed scaling, which carries a history of maxima, is not here.
"""

import os
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch


@dataclass(frozen=True)
class _Type:
    dtype: torch.dtype
    largest: float


_E4M3, _E5M2 = _Type(torch.float8_e4m3fn, 448.0), _Type(torch.float8_e5m2, 57344.0)


class Format(Enum):
    """value: (type of activations and weights, type of gradients)."""

    E4M3 = (_E4M3, _E4M3)
    HYBRID = (_E4M3, _E5M2)


class Recipe:
    """Base of all recipes."""

    def mxfp8(self) -> bool:
        return isinstance(self, MXFP8BlockScaling)

    def delayed(self) -> bool:
        return False


class DelayedScaling(Recipe):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("the FP8 recipe delayed is not in the reference transformer_engine; use tensorwise, blockwise or mxfp8")


@dataclass
class Float8CurrentScaling(Recipe):
    """One float32 scale per tensor, from its own maximum."""

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    power_of_two = False


@dataclass
class Float8BlockScaling(Recipe):
    """Scales of 1 x 128 blocks of activations and gradients and of 128 x 128 blocks of weights.

    Powers of two, unless NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1, as in Transformer Engine.
    """

    fp8_format: Format = Format.E4M3
    power_of_two: bool = field(default_factory=lambda: os.getenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") != "1")


@dataclass
class MXFP8BlockScaling(Recipe):
    """Scales that are powers of two, of 32 values along the dimension that is summed (OCP Microscaling Formats 1.0)."""

    fp8_format: Format = Format.E4M3
    power_of_two = True
