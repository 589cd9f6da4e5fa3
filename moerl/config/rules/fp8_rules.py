"""The rules of FP8: of train.fp8, what the recipes demand of dtype, layers, recomputation and the sizes of every shard; of servers that get
weights in it, what their engines demand."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moerl.config.rules.facts import Facts
from moerl.config.schema.rollout_config import ServerLayout
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.train_config import FP8Config, TrainConfig
from moerl.models.find_family import find_family, is_native
from moerl.models.fp8_names import BLOCK, is_quantized_when_published
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
    if facts.shape is not None and (facts.shape.has_index or facts.shape.delta_heads is not None):
        reason = "what FP8 does to their projections, some of which Megatron multiplies outside of any linear module, is not verified"
        yield problem("train.fp8.recipe", fp8.recipe, "cannot be used with sparse attention or gated delta nets", reason, "train.fp8=null")
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
    both = fp8.first_layers_bf16, fp8.last_layers_bf16
    if max(both) <= most and sum(both) >= num_layers:  # they may meet
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
                "train.fp8.recipe", fp8.recipe, f"needs {shown} to be a multiple of {multiple}", _reason(fp8), _fix(linear, parts, multiple)
            )


def _reason(fp8: FP8Config) -> str:
    if fp8.recipe == "blockwise":
        return "a shard that ends inside a block of 128 would scale it otherwise than the whole weight: numbers would depend on the layout"
    if fp8.recipe == "mxfp8":
        return "values are scaled in groups of 32, along either side of a weight, and Transformer Engine refuses incomplete ones"
    return "FP8 products need both sides of a weight in multiples of 16"


def _fix(linear: LinearSize, parts: int, multiple: int) -> str:
    narrower = [fp8 for fp8 in (FP8Config(recipe="mxfp8"), FP8Config(recipe="tensorwise")) if fp8.alignment < multiple]
    others = [f"train.fp8.recipe={fp8.recipe}" for fp8 in narrower if linear.size % (parts * fp8.alignment) == 0]
    fits = [parts for parts in range(1, linear.size + 1) if linear.cut_by and linear.size % (parts * multiple) == 0]
    smaller = [f"train.layout.{linear.cut_by}={max(fits)} or a divisor of it"] if fits else []
    return ", or ".join([*smaller, *others, "train.fp8=null"])


def linear_sizes(hf: Mapping[str, Any], *, trains_mtp: bool) -> Iterator[LinearSize]:
    """Both sides of every linear layer that FP8 computes, by the model's config.json."""
    megatron = find_family(hf).transformer_config(hf)
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


# -- weights of servers --------------------------------------------------------------------------------------


def server_fp8_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Every rule of rollout.layout.weights=fp8 that is broken with vllm or sglang, for the model if it is known."""
    rollout, hf = config.rollout, facts.hf
    if rollout.layout.weights != "fp8" or not rollout.traits.has_environment:
        return
    path = "rollout.layout.weights"
    if config.placement.gpu is not None and config.rollout_dtype == "float32":
        reason = "kernels that multiply blocks of FP8 on GPUs return 16 bits, and the engine refuses"
        yield problem("rollout.dtype", "float32", "must be bfloat16 with rollout.layout.weights=fp8", reason, "rollout.dtype=bfloat16")
    if hf is None:
        return
    if not is_native(hf):
        reason = "which of its matrices published folders quantize, and engines take so, is known of families in moerl/models"
        yield problem(path, "fp8", "cannot be sent of a family that Megatron-Bridge declares", reason, "rollout.layout.weights=dtype")
        return
    if find_family(hf).served.has_stacks:
        reason = "its experts are stored as stacks, and blocks of 128 x 128 are made of matrices"
        yield problem(path, "fp8", "cannot be sent of this model", reason, "rollout.layout.weights=dtype")
        return
    if kept := _kept_projections(hf):
        reason = f"config.json says that {kept[0]} and {len(kept) - 1} others stay as they are (modules_to_not_convert)"
        yield problem(path, "fp8", "would quantize what the model's makers did not", reason, "rollout.layout.weights=dtype")
    for name, size in dict.fromkeys(_server_sizes(hf, rollout.engine, rollout.layout)):
        if size % BLOCK:
            reason = f"scales belong to blocks of {BLOCK}, and a GPU of this layout would hold {size} of {name}"
            fix = "a smaller rollout.layout.gpus, a larger dp or ep, or rollout.layout.weights=dtype"
            yield problem(path, "fp8", f"needs parts of {name} that are multiples of {BLOCK}", reason, fix)


def _kept_projections(hf: Mapping[str, Any]) -> list[str]:
    """Modules that a published FP8 folder keeps in 16 bits, and a push would not."""
    quantization = hf.get("quantization_config") or {}
    kept = quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or ()
    return [name for name in kept if is_quantized_when_published(f"{name}.weight", (1, 1))]


def _server_sizes(hf: Mapping[str, Any], engine: str, layout: ServerLayout) -> Iterator[tuple[str, int]]:
    """Parts that a GPU holds of each side that engines cut, or join with others; sizes that do not divide break other rules."""
    megatron = find_family(hf).transformer_config(hf)
    sglang_groups = engine == "sglang" and layout.dp > 1  # it then cuts neither dense layers nor, with an all-to-all, shared experts
    if megatron.get("multi_latent_attention"):
        yield from _server_latent_sizes(hf, layout.tp)
    else:
        heads, groups, width = (megatron[name] for name in ("num_attention_heads", "num_query_groups", "kv_channels"))
        yield "num_attention_heads * head_dim", heads * width // layout.tp
        yield "num_key_value_heads * head_dim", max(groups // layout.tp, 1) * width
    expert, layers = megatron.get("moe_ffn_hidden_size"), megatron.get("moe_layer_freq")
    if expert is None or (isinstance(layers, list) and 0 in layers):
        yield "intermediate_size", hf["intermediate_size"] // (1 if sglang_groups else layout.tp)
    if expert is not None:
        yield "an expert", expert // layout.expert_tp
    if (shared := megatron.get("moe_shared_expert_intermediate_size")) is not None:
        yield "the shared experts", shared // (1 if layout.uses_deepep else layout.gpus if engine == "sglang" else layout.tp)


def _server_latent_sizes(hf: Mapping[str, Any], tp: int) -> Iterator[tuple[str, int]]:
    heads, plain, rotary, value = (hf[n] for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if hf["q_lora_rank"] is not None:
        yield "q_lora_rank", hf["q_lora_rank"]
    if tp > 1:
        yield "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)", heads * (plain + rotary) // tp
        yield "num_attention_heads * (qk_nope_head_dim + v_head_dim)", heads * (plain + value) // tp
        yield "num_attention_heads * v_head_dim", heads * value // tp
