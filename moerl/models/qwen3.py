"""Qwen3, dense and mixture of experts (0.6B to 235B-A22B). Names: transformers, models/qwen3*/modeling_*.py."""

from collections.abc import Mapping
from typing import Any

from moerl.models.family import Family, Rule

_LAYER, _HF = "decoder.layers.{layer}", "model.layers.{layer}"

_COMMON = (
    Rule(megatron="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",), shard="vocab"),
    Rule(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
    Rule(megatron="output_layer.weight", hf=("lm_head.weight",), shard="vocab"),
    Rule(megatron=f"{_LAYER}.self_attention.linear_qkv.layer_norm_weight", hf=(f"{_HF}.input_layernorm.weight",)),
    Rule(
        megatron=f"{_LAYER}.self_attention.linear_qkv.weight",
        hf=tuple(f"{_HF}.self_attn.{name}_proj.weight" for name in "qkv"),
        shard="qkv",
    ),
    Rule(megatron=f"{_LAYER}.self_attention.q_layernorm.weight", hf=(f"{_HF}.self_attn.q_norm.weight",)),
    Rule(megatron=f"{_LAYER}.self_attention.k_layernorm.weight", hf=(f"{_HF}.self_attn.k_norm.weight",)),
    Rule(megatron=f"{_LAYER}.self_attention.linear_proj.weight", hf=(f"{_HF}.self_attn.o_proj.weight",), shard="row"),
)

_DENSE_MLP = (
    Rule(megatron=f"{_LAYER}.mlp.linear_fc1.layer_norm_weight", hf=(f"{_HF}.post_attention_layernorm.weight",)),
    Rule(
        megatron=f"{_LAYER}.mlp.linear_fc1.weight",
        hf=(f"{_HF}.mlp.gate_proj.weight", f"{_HF}.mlp.up_proj.weight"),
        shard="gate_up",
    ),
    Rule(megatron=f"{_LAYER}.mlp.linear_fc2.weight", hf=(f"{_HF}.mlp.down_proj.weight",), shard="row"),
)

_EXPERTS = (
    Rule(megatron=f"{_LAYER}.pre_mlp_layernorm.weight", hf=(f"{_HF}.post_attention_layernorm.weight",)),
    Rule(megatron=f"{_LAYER}.mlp.router.weight", hf=(f"{_HF}.mlp.gate.weight",)),
    Rule(
        megatron=f"{_LAYER}.mlp.experts.linear_fc1.weight{{expert}}",
        hf=(f"{_HF}.mlp.experts.{{expert}}.gate_proj.weight", f"{_HF}.mlp.experts.{{expert}}.up_proj.weight"),
        shard="gate_up",
    ),
    Rule(
        megatron=f"{_LAYER}.mlp.experts.linear_fc2.weight{{expert}}",
        hf=(f"{_HF}.mlp.experts.{{expert}}.down_proj.weight",),
        shard="row",
    ),
)


def _dense_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf["head_dim"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        "init_method_std": hf["initializer_range"],
        "qk_layernorm": True,
        "add_qkv_bias": hf["attention_bias"],
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
    }


def _moe_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers"):
        raise ValueError("decoder_sparse_step must be 1 and mlp_only_layers empty: this table has experts in every layer")
    return _dense_config(hf) | {
        "num_moe_experts": hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"],  # the latter since transformers 5
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        # softmax over the chosen experts equals softmax over all, renormalised
        "moe_router_pre_softmax": not hf["norm_topk_prob"],
        "moe_grouped_gemm": True,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_layer_freq": 1,
    }


QWEN3 = Family(rules=_COMMON + _DENSE_MLP, transformer_config=_dense_config)
QWEN3_MOE = Family(rules=_COMMON + _EXPERTS, transformer_config=_moe_config)
