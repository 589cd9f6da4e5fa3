"""Fused kernels of Megatron and Transformer Engine: each is on where a GPU has it and it computes what the model says, or off for a reason.

Decided here alone, when the model is built, from what is installed and from what the model is; `train.megatron` overrides each of them. A
rank logs the decision. Kernels that Megatron takes without being asked (attention, norms, loss-free optimizers) are no part of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from moerl.types.errors import ConfigError, problem

_CLAMPS = "the kernel neither clamps nor shifts"
_INTERLEAVED = "the kernel for packed sequences would take pairs that are interleaved for halves"
_YARN = "the kernel leaves out YaRN's factor"
_WRONG = (_CLAMPS, _INTERLEAVED, _YARN)
_MLA = "the kernel for latent attention is experimental in Megatron, and no GPU has shown moerl's log-probs with it"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernels:
    """Fused kernels that this process can run."""

    on_gpu: bool
    """With Transformer Engine, not its reference, which has rotary positions alone."""
    has_rope: bool
    has_permutation: bool
    has_gradient_accumulation: bool
    """apex's, which Megatron wants for its output layer; linear layers of Transformer Engine have their own."""

    @classmethod
    def found(cls) -> "FusedKernels":
        """As Megatron looks for them (transformer_config.py, __post_init__; tensor_parallel/layers.py)."""
        from megatron.core.models.common.embeddings import rope_utils
        from megatron.core.tensor_parallel import layers
        from megatron.core.transformer.moe import moe_utils

        from megatron_patches import reference_te

        names = ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute")
        return cls(
            on_gpu=torch.cuda.is_available() and not reference_te.active(),
            has_rope=rope_utils.fused_apply_rotary_pos_emb_thd is not None,
            has_permutation=all(getattr(moe_utils, f"fused_{name}", None) is not None for name in names),
            has_gradient_accumulation=layers._grad_accum_fusion_available,
        )


@dataclass(frozen=True, slots=True)
class Fusions:
    why_off: Mapping[str, str]
    """Field of Megatron's TransformerConfig -> why it is off; empty: on."""

    def settings(self) -> dict[str, bool]:
        return {field: not reason for field, reason in self.why_off.items()}

    def check(self, overrides: Mapping[str, Any]) -> None:
        """`overrides`: train.megatron. Raises ConfigError where it asks for a kernel that would compute another model without a word."""
        rule, fix = "is not for this model", "leave it out"
        wrong = [field for field, reason in self.why_off.items() if reason in _WRONG and overrides.get(field)]
        if wrong:
            raise ConfigError([problem(f"train.megatron.{field}", True, rule, self.why_off[field], fix) for field in wrong])

    def words(self, overrides: Mapping[str, Any]) -> str:
        """Line for a log. `overrides`: train.megatron."""
        told = {field: (overrides[field], "train.megatron says so") for field in self.why_off if field in overrides}
        states = {field: (not reason, reason) for field, reason in self.why_off.items()} | told
        return "; ".join(f"{field} {'on' if on else 'off'}" + (f" ({why})" if why else "") for field, (on, why) in states.items())


def fusions(kernels: FusedKernels, model: Mapping[str, Any]) -> Fusions:
    """`model`: keyword arguments of TransformerConfig that describe it and how it is trained, train.megatron's too, and `yarn_...` of YaRN
    outside of latent attention."""
    everywhere = "" if kernels.on_gpu else "no GPU with Transformer Engine"
    if kernels.on_gpu and model["params_dtype"] == torch.float64:
        everywhere = "kernels have no float64"
    found = {
        "bias_activation_fusion": _swiglu(model),
        "apply_rope_fusion": _rope(kernels, model),
        "moe_permute_fusion": _permutation(kernels, model),
        "gradient_accumulation_fusion": ""
        if kernels.has_gradient_accumulation
        else "apex, which Megatron's output layer wants, is not here",
        # Its choice of experts decides what is trained: the router that is held equal to transformers' stays.
        "moe_router_fusion": "experts must be those that servers choose, and the fused router takes no routes (train.router_replay)",
        "masked_softmax_fusion": "attention of packed sequences has no masked softmax",
    }
    of_reference = () if kernels.on_gpu else ("apply_rope_fusion",)
    return Fusions({field: why if why in _WRONG or field in of_reference else everywhere or why for field, why in found.items()})


def _swiglu(model: Mapping[str, Any]) -> str:
    if model.get("activation_func") is not functional.silu or not model.get("gated_linear_unit"):
        return "the activation is not SwiGLU"
    if model.get("add_bias_linear"):
        return "the kernel that weighs experts takes no bias (fused_bias_swiglu.py)"
    if model.get("activation_func_clamp_value") is not None or model.get("glu_linear_offset", 0.0) != 0.0:
        return _CLAMPS
    if model.get("use_te_activation_func"):
        return "Transformer Engine's own activation is asked for, and Megatron takes one of the two"
    return ""


def _rope(kernels: FusedKernels, model: Mapping[str, Any]) -> str:
    """The kernel for packed sequences is given neither `rotary_interleaved` nor YaRN's factor (rope_utils.py, apply_rotary_pos_emb): with
    either it would compute something else without a word."""
    if model.get("multi_latent_attention"):
        return _MLA
    if model.get("experimental_attention_variant"):
        return "layers of another kind of attention refuse it or have no positions"
    if model.get("rotary_interleaved"):
        return _INTERLEAVED
    if any(name.startswith("yarn_") for name in model):
        return _YARN
    return "" if kernels.has_rope else "Transformer Engine has none here"


def _permutation(kernels: FusedKernels, model: Mapping[str, Any]) -> str:
    if not model.get("num_moe_experts"):
        return "the model has no experts"
    return "" if kernels.has_permutation else "Transformer Engine has none here (2.1 has, and wants Triton)"
