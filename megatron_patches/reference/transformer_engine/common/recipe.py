"""The FP8 recipes Megatron builds, with Transformer Engine's names and defaults (transformer_engine/common/recipe/__init__.py)."""

import os
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple


class _FormatHelper(NamedTuple):
    """Largest finite values of the forward and the backward type. Named as in Transformer Engine, for Megatron's list of safe pickles."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """HYBRID: gradients in e5m2, which has more range and less precision; everything else, and with E4M3 all, in e4m3."""

    E4M3 = _FormatHelper(448.0, 448.0)
    HYBRID = _FormatHelper(448.0, 57344.0)


class Recipe:
    """Questions that Transformer Engine and Megatron ask any recipe."""

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        return isinstance(self, DelayedScaling | Float8CurrentScaling)

    def float8_block_scaling(self) -> bool:
        return isinstance(self, Float8BlockScaling)

    def mxfp8(self) -> bool:
        return isinstance(self, MXFP8BlockScaling)


class DelayedScaling(Recipe):
    """One scale per tensor, from the largest values of earlier passes."""

    def __init__(self, margin: int = 0, fp8_format: Format = Format.HYBRID, amax_history_len: int = 1024,
                 amax_compute_algo: Literal["max", "most_recent"] = "max", reduce_amax: bool = True, fp8_dpa: bool = False,
                 fp8_mha: bool = False, override_linear_precision: tuple[bool, ...] = (False, False, False), **_: Any) -> None:  # fmt: skip
        _refuse_attention(fp8_dpa, fp8_mha)
        if any(override_linear_precision):
            raise RuntimeError("override_linear_precision (Megatron's fp8_wgrad=False) is not in the reference transformer_engine")
        self.margin, self.fp8_format, self.reduce_amax = margin, fp8_format, reduce_amax
        self.amax_history_len, self.amax_compute_algo = amax_history_len, amax_compute_algo


@dataclass
class Float8CurrentScaling(Recipe):
    """One float32 scale per tensor, from its own largest value."""

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False

    def __post_init__(self) -> None:
        _refuse_attention(self.fp8_dpa)


@dataclass
class Float8BlockScaling(Recipe):
    """Activations and gradients in blocks of 1 x 128, weights of 128 x 128. Scales are powers of two unless use_f32_scales."""

    fp8_format: Format = Format.E4M3
    # Megatron cannot pass it: this variable of Transformer Engine is the only way.
    use_f32_scales: bool = os.getenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") == "1"
    fp8_dpa: bool = False

    def __post_init__(self) -> None:
        _refuse_attention(self.fp8_dpa)


@dataclass
class MXFP8BlockScaling(Recipe):
    """Everything in blocks of 1 x 32 with an exponent of 8 bits as scale (OCP Microscaling Formats 1.0)."""

    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False

    def __post_init__(self) -> None:
        _refuse_attention(self.fp8_dpa)


def _refuse_attention(*options: bool) -> None:
    if any(options):
        raise RuntimeError("attention in FP8 (fp8_dot_product_attention) is not in the reference transformer_engine")
