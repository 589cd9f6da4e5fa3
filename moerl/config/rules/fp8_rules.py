"""The rules of train.fp8: what the recipes demand of dtype, layers, recomputation and the sizes of every shard."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moerl.config.rules.facts import Facts
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.train_config import FP8Config, TrainConfig
from moerl.models.families.family_table import FAMILIES
from moerl.types.errors import Problem, problem

_ENDS = ("first_layers_bf16", "last_layers_bf16")


@dataclass(frozen=True, kw_only=True)
class LinearSize:
    """A side of a linear layer's weight."""

    name: str
    """As written in config.json."""
    size: int
    cut_by: str = ""
    """Parallel size of the layout that shares it out; empty: whole on every rank."""
    is_output: bool = False
    """Nothing is summed over it and no rank holds a part of it, so it need not be whole blocks."""


def fp8_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Every rule of FP8 that is broken, for the model if it is known."""
    train, fp8, hf = config.train, config.train.fp8, facts.hf
    if fp8 is None:
        return
    if train.dtype != "bfloat16":
        reason = "FP8 operands are made from bfloat16 ones, and Transformer Engine returns bfloat16"
        yield problem("train.dtype", train.dtype, "must be bfloat16 with train.fp8", reason, "train.dtype=bfloat16, or train.fp8=null")
    if fp8.recipe == "delayed":
        yield from _delayed_problems(fp8, train)
    if hf is not None:
        yield from _layer_problems(fp8, train, hf["num_hidden_layers"])
        yield from _size_problems(fp8, train, hf)


def _delayed_problems(fp8: FP8Config, train: TrainConfig) -> Iterator[Problem]:
    kind = train.recompute.kind
    if kind != "off":
        reason = "the scales have moved on when a layer is computed again, and remembering the first ones is not verified here"
        fix = "train.recompute.kind=off, or train.fp8.recipe=blockwise or tensorwise"
        yield problem("train.recompute.kind", kind, "must be off for train.fp8.recipe=delayed", reason, fix)
    if fp8.format != "hybrid":
        reason = "scales start at 1 and follow a pass late: gradients, which are small and grow suddenly, fall out of the range of e4m3"
        yield problem("train.fp8.format", fp8.format, "must be hybrid for recipe=delayed", reason, "train.fp8.format=hybrid")
    for name in _ENDS:
        if getattr(fp8, name):
            reason = "delayed scales are reduced once for all layers, which must therefore share one FP8 region (Megatron)"
            fix = f"train.fp8.{name}=0, or another recipe"
            yield problem(f"train.fp8.{name}", getattr(fp8, name), "must be 0 for recipe=delayed", reason, fix)


def _layer_problems(fp8: FP8Config, train: TrainConfig, num_layers: int) -> Iterator[Problem]:
    most = num_layers // train.layout.pp
    for name in _ENDS:
        value = getattr(fp8, name)
        if value > most:
            reason = f"Megatron takes at most as many as a pipeline stage has on average: {num_layers} / train.layout.pp={train.layout.pp}"
            yield problem(f"train.fp8.{name}", value, f"must be at most {most}", reason, f"train.fp8.{name}={most}")
    both = fp8.first_layers_bf16 + fp8.last_layers_bf16
    if both == num_layers:
        reason = "first_layers_bf16 and last_layers_bf16 together are all the layers the model has"
        yield problem("train.fp8.recipe", fp8.recipe, "leaves no layer to FP8", reason, "fewer of them, or train.fp8=null")


def _size_problems(fp8: FP8Config, train: TrainConfig, hf: Mapping[str, Any]) -> Iterator[Problem]:
    seen = set()
    for linear in linear_sizes(hf, trains_mtp=train.mtp_loss > 0):
        parts = getattr(train.layout, linear.cut_by) if linear.cut_by else 1
        multiple = 16 if fp8.recipe == "blockwise" and linear.is_output else fp8.alignment
        if linear.size % (parts * multiple) and (linear.name, parts) not in seen:
            seen.add((linear.name, parts))
            shown = f"{linear.name} = {linear.size}" if parts == 1 else f"{linear.name} / {linear.cut_by} = {linear.size} / {parts}"
            yield problem(
                "train.fp8.recipe", fp8.recipe, f"needs {shown} to be a multiple of {multiple}", _reason(fp8), _fix(fp8, linear, multiple)
            )


def _reason(fp8: FP8Config) -> str:
    if fp8.recipe == "blockwise":
        return "a shard that ends inside a block of 128 would scale it otherwise than the whole weight: numbers would depend on the layout"
    if fp8.recipe == "mxfp8":
        return "values are scaled in groups of 32, along either side of a weight, and Transformer Engine refuses incomplete ones"
    return "FP8 products need both sides of a weight in multiples of 16"


def _fix(fp8: FP8Config, linear: LinearSize, multiple: int) -> str:
    others = [f"train.fp8.recipe={name}" for name in ("mxfp8", "tensorwise") if FP8Config(recipe=name).alignment < multiple]
    fits = [parts for parts in range(1, linear.size + 1) if linear.cut_by and linear.size % (parts * multiple) == 0]
    smaller = [f"train.layout.{linear.cut_by}={max(fits)} or a divisor of it"] if fits else []
    return ", or ".join([*smaller, *others, "train.fp8=null"])


def linear_sizes(hf: Mapping[str, Any], *, trains_mtp: bool) -> Iterator[LinearSize]:
    """Both sides of every linear layer that FP8 computes, by the model's config.json."""
    megatron = FAMILIES[hf["model_type"]].transformer_config(hf)
    yield LinearSize(name="hidden_size", size=hf["hidden_size"])
    yield from _latent_attention(hf) if megatron.get("multi_latent_attention") else _attention(megatron)
    expert, shared = (megatron.get(name) for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"))
    layers = megatron.get("moe_layer_freq")
    if expert is None or (isinstance(layers, list) and 0 in layers):  # some are dense
        yield LinearSize(name="intermediate_size", size=hf["intermediate_size"], cut_by="tp")
    if expert is not None:
        # Models without dense layers may call the experts' size as others call that of dense layers (Mixtral).
        name = "moe_intermediate_size" if "moe_intermediate_size" in hf else "intermediate_size"
        yield LinearSize(name=name, size=expert, cut_by="etp")
    if shared is not None:
        name = "n_shared_experts * moe_intermediate_size" if "n_shared_experts" in hf else "shared_expert_intermediate_size"
        yield LinearSize(name=name, size=shared, cut_by="tp")
    if trains_mtp:
        yield LinearSize(name="hidden_size", size=hf["hidden_size"], cut_by="tp")


def _attention(megatron: Mapping[str, Any]) -> Iterator[LinearSize]:
    heads, groups, width = (megatron[name] for name in ("num_attention_heads", "num_query_groups", "kv_channels"))
    yield LinearSize(name="(num_attention_heads + 2 * num_key_value_heads) * head_dim", size=(heads + 2 * groups) * width, cut_by="tp")
    yield LinearSize(name="num_attention_heads * head_dim", size=heads * width, cut_by="tp")


def _latent_attention(hf: Mapping[str, Any]) -> Iterator[LinearSize]:
    heads, plain, rotary, value = (hf[n] for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if hf["q_lora_rank"] is not None:
        yield LinearSize(name="q_lora_rank", size=hf["q_lora_rank"])
    yield LinearSize(name="kv_lora_rank", size=hf["kv_lora_rank"])
    yield LinearSize(name="kv_lora_rank + qk_rope_head_dim", size=hf["kv_lora_rank"] + rotary, is_output=True)
    yield LinearSize(name="num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)", size=heads * (plain + rotary), cut_by="tp")
    yield LinearSize(name="num_attention_heads * (qk_nope_head_dim + v_head_dim)", size=heads * (plain + value), cut_by="tp")
    yield LinearSize(name="num_attention_heads * v_head_dim", size=heads * value, cut_by="tp")
