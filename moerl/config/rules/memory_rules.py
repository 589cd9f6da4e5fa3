"""Rules of recomputation, of the optimizer's states, of offload and of overlap."""

from collections.abc import Iterator
from dataclasses import fields

from moerl.config.derive.model_shape import ModelShape
from moerl.config.derive.pipeline import chunk_layers
from moerl.config.rules.facts import Facts
from moerl.config.rules.parallel_rules import broken_layout
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.train_config import FullRecompute, RecomputeModule, SelectiveRecompute, TrainConfig
from moerl.types.errors import Problem, problem

_OF_EXPERTS = ("moe", "moe_act")


def memory_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Every rule the memory settings break, for the model if it is known."""
    train, shape = config.train, facts.shape
    if isinstance(train.recompute, FullRecompute):
        yield from _full_problems(train, train.recompute, shape)
    if isinstance(train.recompute, SelectiveRecompute):
        yield from _selective_problems(train.recompute, shape)
        if "shared_experts" in train.recompute.modules and train.megatron.get("moe_shared_expert_overlap"):
            rule, reason = "does not go with shared_experts in train.recompute.modules", "Megatron computes them again as one module"
            yield problem("train.megatron.moe_shared_expert_overlap", True, rule, reason, "one of the two")
    yield from _optimizer_problems(train)
    yield from _overlap_problems(train, shape)
    if train.destroy_groups and train.offload != "all":
        reason = "communicators are of no use only while the trainer sleeps, and then its parameters hold more memory than they"
        yield problem("train.destroy_groups", True, "needs train.offload=all", reason, "train.offload=all, or destroy_groups=false")


def _full_problems(train: TrainConfig, recompute: FullRecompute, shape: ModelShape | None) -> Iterator[Problem]:
    if shape is None or any(broken_layout(train.layout, shape)):
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


def _optimizer_problems(train: TrainConfig) -> Iterator[Problem]:
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
    if memory.cpu_fraction > 0 and not memory.precision_aware:
        reason = "the hybrid optimizer cannot load a checkpoint over float32 masters of Megatron's (hybrid_optimizer.py, 0.16.1)"
        fix = f"{path}.precision_aware=true, which puts masters on the host too, or cpu_fraction=0"
        yield problem(f"{path}.cpu_fraction", memory.cpu_fraction, "needs precision_aware=true", reason, fix)
    if train.optimizer.muon is not None and memory.precision_aware:
        reason = "Muon moves the master weights of Megatron's distributed optimizer, which has none then: Adam keeps them"
        fix = f"{path}.precision_aware=false, or train.optimizer.muon=null"
        yield problem(f"{path}.precision_aware", True, "needs train.optimizer.muon=null", reason, fix)
    if memory.cpu_overlap and memory.cpu_fraction == 0:
        yield problem(f"{path}.cpu_overlap", True, "needs cpu_fraction > 0", "nothing is copied without it", f"{path}.cpu_fraction=1.0")


def _overlap_problems(train: TrainConfig, shape: ModelShape | None) -> Iterator[Problem]:
    if train.overlap_param_gather and shape is not None and (shape.has_index or shape.delta_heads is not None):
        reason = "its attention takes weights of modules that it does not call, and Megatron waits for a gather where a module is called"
        yield problem("train.overlap_param_gather", True, "cannot go with this model", reason, "train.overlap_param_gather=false")
    if train.overlap_param_gather and not train.overlap_grad_reduce:
        reason = "without overlap_grad_reduce all parameters form one bucket, so that nothing can run beside its gather"
        fix = "train.overlap_grad_reduce=true, or overlap_param_gather=false"
        yield problem("train.overlap_param_gather", True, "needs train.overlap_grad_reduce=true", reason, fix)
    if train.overlap_bucket_size is not None and not train.overlap_grad_reduce:
        reason = "without overlap_grad_reduce all parameters form one bucket"
        fix = "train.overlap_grad_reduce=true, or leave it out"
        yield problem("train.overlap_bucket_size", train.overlap_bucket_size, "needs train.overlap_grad_reduce=true", reason, fix)
