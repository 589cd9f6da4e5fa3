"""Settings that trade time for memory: recomputation and the optimizer's states."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from moerl.config.schema.strict import Strict

RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


# -- recomputation ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NoRecompute(Strict):
    """Every activation is kept for the backward pass."""

    kind: Literal["off"] = "off"


@dataclass(frozen=True, kw_only=True)
class FullRecompute(Strict):
    """Whole transformer layers run again in the backward pass; only their inputs are kept."""

    kind: Literal["full"] = "full"
    method: Literal["uniform", "block"] = "uniform"
    """uniform: all layers, in units of num_layers, of which only the first input is kept. block: only the first num_layers of
    every model chunk."""
    num_layers: Annotated[int, Field(gt=0)] = 1
    """At most the layers of a model chunk."""


@dataclass(frozen=True, kw_only=True)
class SelectiveRecompute(Strict):
    """Only some modules run again in the backward pass."""

    kind: Literal["selective"] = "selective"
    modules: Annotated[tuple[RecomputeModule, ...], Field(min_length=1)] = ("core_attn",)
    """core_attn: attention itself (fused kernels do so anyway). layernorm: norms that are modules of their own. mla_up_proj: up
    projections and rotary embedding of multi-latent attention. mlp: dense MLPs. moe: whole mixture-of-experts layers. moe_act: the
    experts' activation function. shared_experts: the experts every token goes to."""


Recompute = Annotated[NoRecompute | FullRecompute | SelectiveRecompute, Field(discriminator="kind")]


# -- optimizer -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory(Strict):
    """Where the optimizer's states live and how wide they are."""

    cpu_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the parameters whose states stay in host memory and whose update runs there (Megatron's hybrid optimizer).
    Needs a GPU."""
    cpu_overlap: bool = False
    """Copy gradients to the host and parameters back while others are updated; one optimizer object per parameter."""
    precision_aware: bool = False
    """Let Transformer Engine's FusedAdam keep master weights and moments, in the types below. Needs dtype=bfloat16."""
    main_params_dtype: Literal["float32", "float16"] = "float32"
    """Dtype of the master weights; float16 loses precision. This and the next three need precision_aware."""
    main_grads_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the gradients that micro-batches add up in and that ranks reduce."""
    exp_avg_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of Adam's first moment. float16 is scaled per tensor."""
    exp_avg_sq_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of Adam's second moment. float16 is scaled per tensor."""
