"""DeepSeek-V3: multi-head latent attention, group-limited sigmoid router with a bias, shared expert, multi-token prediction.

Names: transformers, models/deepseek_v3/modeling_deepseek_v3.py; of the layers of multi-token prediction, which transformers does not
build: the published checkpoint, where layer num_hidden_layers + i is a decoder layer plus enorm, hnorm, eh_proj and shared_head.
"""

from collections.abc import Mapping
from typing import Any

from moerl.config.deepseek import broken_rules, rope_parameters
from moerl.models.family import Family, Rule
from moerl.types import CheckpointError


def _layer(megatron: str, hf: str) -> tuple[Rule, ...]:
    """A decoder layer, dense or with experts. The down-projections to the latents are whole on every tensor-parallel rank."""
    attention, theirs = f"{megatron}.self_attention", f"{hf}.self_attn"
    return (
        Rule(megatron=f"{megatron}.input_layernorm.weight", hf=(f"{hf}.input_layernorm.weight",)),
        Rule(megatron=f"{attention}.linear_q_proj.weight", hf=(f"{theirs}.q_proj.weight",), shard="column"),
        Rule(megatron=f"{attention}.linear_q_down_proj.weight", hf=(f"{theirs}.q_a_proj.weight",)),
        Rule(megatron=f"{attention}.linear_q_up_proj.layer_norm_weight", hf=(f"{theirs}.q_a_layernorm.weight",)),
        Rule(megatron=f"{attention}.linear_q_up_proj.weight", hf=(f"{theirs}.q_b_proj.weight",), shard="column"),
        Rule(megatron=f"{attention}.linear_kv_down_proj.weight", hf=(f"{theirs}.kv_a_proj_with_mqa.weight",)),
        Rule(megatron=f"{attention}.linear_kv_up_proj.layer_norm_weight", hf=(f"{theirs}.kv_a_layernorm.weight",)),
        Rule(megatron=f"{attention}.linear_kv_up_proj.weight", hf=(f"{theirs}.kv_b_proj.weight",), shard="column"),
        Rule(megatron=f"{attention}.linear_proj.weight", hf=(f"{theirs}.o_proj.weight",), shard="row"),
        *_dense(f"{megatron}.mlp", f"{hf}.mlp"),
        Rule(megatron=f"{megatron}.mlp.linear_fc1.layer_norm_weight", hf=(f"{hf}.post_attention_layernorm.weight",)),
        Rule(megatron=f"{megatron}.pre_mlp_layernorm.weight", hf=(f"{hf}.post_attention_layernorm.weight",)),
        *_dense(f"{megatron}.mlp.shared_experts", f"{hf}.mlp.shared_experts"),
        Rule(megatron=f"{megatron}.mlp.router.weight", hf=(f"{hf}.mlp.gate.weight",)),
        Rule(megatron=f"{megatron}.mlp.router.expert_bias", hf=(f"{hf}.mlp.gate.e_score_correction_bias",), is_float32=True),
        Rule(
            megatron=f"{megatron}.mlp.experts.linear_fc1.weight{{expert}}",
            hf=(f"{hf}.mlp.experts.{{expert}}.gate_proj.weight", f"{hf}.mlp.experts.{{expert}}.up_proj.weight"),
            shard="gate_up",
        ),
        Rule(
            megatron=f"{megatron}.mlp.experts.linear_fc2.weight{{expert}}",
            hf=(f"{hf}.mlp.experts.{{expert}}.down_proj.weight",),
            shard="row",
        ),
    )


def _dense(megatron: str, hf: str) -> tuple[Rule, ...]:
    return (
        Rule(megatron=f"{megatron}.linear_fc1.weight", hf=(f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), shard="gate_up"),
        Rule(megatron=f"{megatron}.linear_fc2.weight", hf=(f"{hf}.down_proj.weight",), shard="row"),
    )


_MTP, _MTP_HF = "mtp.layers.{mtp}", "model.layers.{mtp}"

_RULES = (
    Rule(
        megatron="embedding.word_embeddings.weight",
        hf=("model.embed_tokens.weight",),
        shard="vocab",
        copies=(f"{_MTP_HF}.embed_tokens.weight",),
    ),
    *_layer("decoder.layers.{layer}", "model.layers.{layer}"),
    Rule(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
    Rule(megatron="output_layer.weight", hf=("lm_head.weight",), shard="vocab", copies=(f"{_MTP_HF}.shared_head.head.weight",)),
    Rule(megatron=f"{_MTP}.enorm.weight", hf=(f"{_MTP_HF}.enorm.weight",)),
    Rule(megatron=f"{_MTP}.hnorm.weight", hf=(f"{_MTP_HF}.hnorm.weight",)),
    Rule(megatron=f"{_MTP}.eh_proj.weight", hf=(f"{_MTP_HF}.eh_proj.weight",), shard="column"),
    *_layer(f"{_MTP}.transformer_layer", _MTP_HF),
    Rule(megatron=f"{_MTP}.final_layernorm.weight", hf=(f"{_MTP_HF}.shared_head.norm.weight",)),
)


def _config(hf: Mapping[str, Any]) -> dict[str, Any]:
    if broken := list(broken_rules(hf)):
        raise CheckpointError("config.json: " + "; ".join(f"{rule} ({reason})" for rule, reason, _ in broken))
    dense = hf["first_k_dense_replace"]
    return {
        "multi_latent_attention": True,
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "qk_layernorm": True,
        "layernorm_epsilon": hf["rms_norm_eps"],
        "init_method_std": hf["initializer_range"],
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "moe_layer_freq": [0] * dense + [1] * (hf["num_hidden_layers"] - dense),
        **_experts(hf),
        **_rope(rope_parameters(hf), hf["max_position_embeddings"]),
    }


def _experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    is_limited = hf["topk_group"] != hf["n_group"]
    return {
        "num_moe_experts": hf["n_routed_experts"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": hf["moe_intermediate_size"] * hf["n_shared_experts"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_num_groups": hf["n_group"] if is_limited else None,
        "moe_router_group_topk": hf["topk_group"] if is_limited else None,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": True,
    }


def _rope(rope: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    """transformers, modeling_rope_utils.py (_compute_yarn_parameters): cosines and sines are scaled by a ratio if both scales are given."""
    if rope["rope_type"] == "default":
        return {"rope_type": "rope", "rotary_base": rope["rope_theta"]}
    original, factor = rope["original_max_position_embeddings"], rope.get("factor")
    has_both = bool(rope.get("mscale")) and bool(rope.get("mscale_all_dim"))
    return {
        "rope_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": max_positions / original if factor is None else factor,
        "original_max_position_embeddings": original,
        "beta_fast": rope.get("beta_fast", 32),
        "beta_slow": rope.get("beta_slow", 1),
        "mscale": rope["mscale"] if has_both else 1.0,
        "mscale_all_dim": rope["mscale_all_dim"] if has_both else 0.0,
    }


DEEPSEEK_V3 = Family(rules=_RULES, transformer_config=_config)
