"""Settings that trade time for memory: recomputation and the optimizer's states; the rules of these, of offload and of overlap.

Megatron's own rules: megatron/core/transformer/transformer_config.py (__post_init__), megatron/core/optimizer/optimizer_config.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from moerl.config.model_shape import ModelShape
from moerl.config.pipeline import chunk_layers
from moerl.config.problems import problem
from moerl.config.strict import Strict
from moerl.types import Problem

if TYPE_CHECKING:
    from moerl.config.schema_train import TrainConfig

RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
_OF_EXPERTS = ("moe", "moe_act")


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
    """Of the master weights; float16 loses precision. This and the next three need precision_aware."""
    main_grads_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the gradients that micro-batches add up in and that ranks reduce."""
    exp_avg_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of Adam's first moment. float16 is scaled per tensor."""
    exp_avg_sq_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of Adam's second moment. float16 is scaled per tensor."""


# -- rules -----------------------------------------------------------------------------------------------------


def memory_problems(train: "TrainConfig", shape: ModelShape | None) -> Iterator[Problem]:
    """Every rule the memory settings break, for a model of `shape` if it is known."""
    if isinstance(train.recompute, FullRecompute):
        yield from _full_problems(train, train.recompute, shape)
    if isinstance(train.recompute, SelectiveRecompute):
        yield from _selective_problems(train.recompute, shape)
    yield from _optimizer_problems(train)
    yield from _overlap_problems(train)
    if train.destroy_groups and train.offload != "all":
        reason = "communicators are of no use only while the trainer sleeps, and then its parameters hold more memory than they"
        yield problem("train.destroy_groups", True, "needs train.offload=all", reason, "train.offload=all, or destroy_groups=false")


def _full_problems(train: "TrainConfig", recompute: FullRecompute, shape: ModelShape | None) -> Iterator[Problem]:
    if shape is None or any(train.layout.problems(shape)):
        return
    path, num_layers = "train.recompute.num_layers", recompute.num_layers
    chunks = {count for stage in chunk_layers(train.layout, shape.num_layers) for count in stage}
    if num_layers > min(chunks):
        reason = "recomputation works within one model chunk, and the smallest holds that many"
        yield problem(path, num_layers, f"must be at most {min(chunks)}", reason, f"{path}={min(chunks)} or less")
    elif recompute.method == "uniform" and any(count % num_layers for count in chunks):
        rule = f"must divide the layers of every model chunk ({', '.join(map(str, sorted(chunks)))})"
        fits = [n for n in range(1, min(chunks) + 1) if not any(count % n for count in chunks)]
        reason = "method=uniform cuts a chunk into units of as many layers; Megatron would run past the last one"
        yield problem(path, num_layers, rule, reason, "one of " + ", ".join(map(str, fits)))
    elif recompute.method == "uniform" and num_layers > 1 and train.mtp_loss > 0:
        reason = "a layer of multi-token prediction is a unit of its own, and Megatron takes one size of unit for all"
        yield problem(path, num_layers, "must be 1 while train.mtp_loss > 0", reason, f"{path}=1, or train.mtp_loss=0")


def _selective_problems(recompute: SelectiveRecompute, shape: ModelShape | None) -> Iterator[Problem]:
    path = "train.recompute.modules"
    if len(set(recompute.modules)) != len(recompute.modules):
        yield problem(path, list(recompute.modules), "names a module twice", "it would have no effect", "each name once")
    if shape is None:
        return
    for index, name in enumerate(recompute.modules):
        reason = _why_without_effect(name, shape)
        if reason is not None:
            yield problem(f"{path}.{index}", name, f"has no effect in a model of type {shape.model_type}", reason, "leave it out")
    if {"moe", "moe_act"} <= set(recompute.modules):
        reason = "moe runs the whole layer again, the activation function with it"
        yield problem(path, list(recompute.modules), "names moe_act beside moe", reason, "either of them")


def _why_without_effect(module: RecomputeModule, shape: ModelShape) -> str | None:
    if module in _OF_EXPERTS and shape.num_experts is None:
        return "there are no experts"
    if module == "mla_up_proj" and not shape.has_latent_attention:
        return "it has no multi-latent attention"
    if module == "shared_experts" and not shape.has_shared_experts:
        return "it has no shared experts"
    if module == "layernorm" and shape.num_experts is None:
        return "the norms of dense layers are fused with the projections after them"
    return None


def _optimizer_problems(train: "TrainConfig") -> Iterator[Problem]:
    memory, path = train.optimizer.memory, "train.optimizer.memory"
    narrow = [f.name for f in fields(memory) if f.name.endswith("_dtype") and getattr(memory, f.name) != "float32"]
    if memory.precision_aware and train.dtype != "bfloat16":
        reason = "it keeps master weights beside parameters of a narrower type"
        yield problem(
            f"{path}.precision_aware", True, "needs train.dtype=bfloat16", reason, "train.dtype=bfloat16, or precision_aware=false"
        )
    for name in narrow:
        if not memory.precision_aware:
            reason = "only FusedAdam's precision-aware mode keeps its states in other types than float32"
            fix = f"{path}.precision_aware=true, or {name}=float32"
            yield problem(f"{path}.{name}", getattr(memory, name), "needs precision_aware=true", reason, fix)
        elif memory.cpu_fraction > 0:
            reason = "the hybrid optimizer updates in float32 whatever the type (megatron/core/optimizer/__init__.py)"
            yield problem(f"{path}.{name}", getattr(memory, name), "needs cpu_fraction=0", reason, f"{path}.cpu_fraction=0")
    if memory.cpu_overlap and memory.cpu_fraction == 0:
        yield problem(f"{path}.cpu_overlap", True, "needs cpu_fraction > 0", "nothing is copied without it", f"{path}.cpu_fraction=1.0")
    if memory.cpu_fraction > 0 and train.offload != "none":
        reason = "the hybrid optimizer's states are in host memory already; what it keeps on the GPU is moved by its own streams"
        fix = f"{path}.cpu_fraction=0, or train.offload=none"
        yield problem(f"{path}.cpu_fraction", memory.cpu_fraction, "needs train.offload=none", reason, fix)


def _overlap_problems(train: "TrainConfig") -> Iterator[Problem]:
    if train.overlap_param_gather and not train.overlap_grad_reduce:
        reason = "without overlap_grad_reduce all parameters form one bucket, so that nothing can run beside its gather"
        fix = "train.overlap_grad_reduce=true, or overlap_param_gather=false"
        yield problem("train.overlap_param_gather", True, "needs train.overlap_grad_reduce=true", reason, fix)
    if train.overlap_bucket_size is not None and not train.overlap_grad_reduce:
        reason = "without overlap_grad_reduce all parameters form one bucket"
        fix = "train.overlap_grad_reduce=true, or leave it out"
        yield problem("train.overlap_bucket_size", train.overlap_bucket_size, "needs train.overlap_grad_reduce=true", reason, fix)
