"""The rules of FP8: the precision around it, and sizes that its blocks divide."""

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.config.schema import FP8Config, TrainConfig
from moerl.types import Problem


def fp8_problems(train: TrainConfig, model: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Every rule of FP8 that is broken. `model`: its config.json, if it is known."""
    if train.fp8 is None:
        return
    if train.dtype != "bfloat16":
        reason = "FP8 operands are made from bfloat16 ones, and Transformer Engine returns bfloat16"
        yield _problem("train.dtype", train.dtype, "must be bfloat16 with train.fp8", reason, "train.dtype=bfloat16, or train.fp8=null")
    if model is not None:
        yield from _size_problems(train.fp8, train, model)
        yield from _bf16_layer_problems(train.fp8, train, model)


def _size_problems(fp8: FP8Config, train: TrainConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    for name, width, parallel in _widths(train, model):
        if width % (fp8.alignment * parallel):
            shared = "" if parallel == 1 else f" over {parallel} tensor-parallel ranks"
            rule = f"needs {name}={width}{shared} in multiples of {fp8.alignment}"
            reason = "the dimensions of an FP8 matrix product on a rank must be multiples of it"
            yield _problem("train.fp8.recipe", fp8.recipe, rule, reason, "fewer tensor-parallel ranks, another recipe, or train.fp8=null")


def _widths(train: TrainConfig, model: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Dimensions of the layers' weights by their names in config.json, and the ranks that share each."""
    tp, etp = train.layout.tp, train.layout.etp
    yield "hidden_size", model["hidden_size"], 1
    has_experts = any(name in model for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if not has_experts or model.get("first_k_dense_replace", 0) > 0:
        yield "intermediate_size", model["intermediate_size"], tp
    if has_experts:
        yield "moe_intermediate_size", model["moe_intermediate_size"], etp
    if "kv_lora_rank" in model:
        yield from _latent_widths(model, tp)
    else:
        yield "num_attention_heads * head_dim", model["num_attention_heads"] * model["head_dim"], tp
        heads = model["num_attention_heads"] + 2 * model["num_key_value_heads"]
        yield "(num_attention_heads + 2 * num_key_value_heads) * head_dim", heads * model["head_dim"], tp


def _latent_widths(model: Mapping[str, Any], tp: int) -> Iterator[tuple[str, int, int]]:
    heads, rope = model["num_attention_heads"], model["qk_rope_head_dim"]
    if model["q_lora_rank"] is not None:
        yield "q_lora_rank", model["q_lora_rank"], 1
    yield "kv_lora_rank", model["kv_lora_rank"], 1
    yield "kv_lora_rank + qk_rope_head_dim", model["kv_lora_rank"] + rope, 1
    yield "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)", heads * (model["qk_nope_head_dim"] + rope), tp
    yield "num_attention_heads * (qk_nope_head_dim + v_head_dim)", heads * (model["qk_nope_head_dim"] + model["v_head_dim"]), tp
    yield "num_attention_heads * v_head_dim", heads * model["v_head_dim"], tp
    if model.get("first_k_dense_replace", 0) < model["num_hidden_layers"]:
        yield "moe_intermediate_size * n_shared_experts", model["moe_intermediate_size"] * model["n_shared_experts"], tp


def _bf16_layer_problems(fp8: FP8Config, train: TrainConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    most = model["num_hidden_layers"] // train.layout.pp
    for name in ("first_layers_bf16", "last_layers_bf16"):
        if getattr(fp8, name) > most:
            reason = "Megatron takes at most as many as a pipeline stage has on average"
            yield _problem(f"train.fp8.{name}", getattr(fp8, name), f"must be at most {most}", reason, f"train.fp8.{name}={most}")


def _problem(path: str, value: object, rule: str, reason: str, fix: str) -> Problem:
    return Problem(path=path, value=value, rule=rule, reason=reason, fix=fix)
