"""DeepSeek-V3 and Kimi-K2: multi-head latent attention, group-limited sigmoid router with a bias, shared expert, multi-token prediction.

Names: transformers, models/deepseek_v3/modeling_deepseek_v3.py; of the layers of multi-token prediction, which transformers does not
build: the published checkpoint, where layer num_hidden_layers + i is a decoder layer plus enorm, hnorm, eh_proj and shared_head.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from moerl.models.families.parts.family import BrokenRule, Family, Rule, Served
from moerl.models.families.parts.family_checks import NO_WINDOW, Fixed, fixed_values, has_megatron, readable_weights
from moerl.models.families.parts.layer_rules import HF_LAYER, HF_MTP, LAYER, MTP, decoder_fields, dense, ends
from moerl.models.families.parts.rope import rope_parameters, whole_heads
from moerl.models.families.parts.sigmoid_routers import biased_experts, group_limit, grouped_router_fields, last_layer_has_experts, mtp_ends


def latent_layer(megatron: str, hf: str, *, fuses_norms: bool = True) -> tuple[Rule, ...]:
    """A decoder layer, dense or with experts. The down-projections to the latents are whole on every tensor-parallel rank.
    `fuses_norms`: Megatron holds the latents' norms in the projections after them."""
    attention, theirs = f"{megatron}.self_attention", f"{hf}.self_attn"
    norms = {"q": "linear_q_up_proj.layer_norm_weight", "kv": "linear_kv_up_proj.layer_norm_weight"}
    if not fuses_norms:
        norms = {"q": "q_layernorm.weight", "kv": "kv_layernorm.weight"}
    return (
        Rule(megatron=f"{megatron}.input_layernorm.weight", hf=(f"{hf}.input_layernorm.weight",)),
        Rule(megatron=f"{attention}.linear_q_proj.weight", hf=(f"{theirs}.q_proj.weight",), shard="column"),
        Rule(megatron=f"{attention}.linear_q_down_proj.weight", hf=(f"{theirs}.q_a_proj.weight",)),
        *(Rule(megatron=f"{attention}.{name}", hf=(f"{theirs}.{kind}_a_layernorm.weight",)) for kind, name in norms.items()),
        Rule(megatron=f"{attention}.linear_q_up_proj.weight", hf=(f"{theirs}.q_b_proj.weight",), shard="column"),
        Rule(megatron=f"{attention}.linear_kv_down_proj.weight", hf=(f"{theirs}.kv_a_proj_with_mqa.weight",)),
        Rule(megatron=f"{attention}.linear_kv_up_proj.weight", hf=(f"{theirs}.kv_b_proj.weight",), shard="column"),
        Rule(megatron=f"{attention}.linear_proj.weight", hf=(f"{theirs}.o_proj.weight",), shard="row"),
        *dense(megatron, hf),
        *biased_experts(megatron, hf),
    )


def latent_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "qk_layernorm": True,
        **decoder_fields(hf),
        **grouped_router_fields(hf),
        **_rope(rope_parameters(hf), hf["max_position_embeddings"]),
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


def latent_rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's latent attention makes its own from the configuration; GPTModel builds none."""
    return {"position_embedding_type": "rope", "rotary_base": rope_parameters(hf)["rope_theta"]}


_EPS: Fixed = {
    "rms_norm_eps": ((1e-6,), "transformers norms the compressed queries, keys and values with 1e-6, Megatron with rms_norm_eps"),
}
_FIXED: Fixed = {
    **NO_WINDOW,
    "norm_topk_prob": ((True,), "Megatron normalises the weights of the chosen experts whenever scores are sigmoids"),
    "attention_bias": ((False, None), "Megatron's latent attention has no biases"),
    "rope_interleave": ((True, None), "Megatron's latent attention turns neighbouring channels"),
    "tie_word_embeddings": ((False, None), "Megatron cannot save an output layer tied to an embedding that multi-token prediction shares"),
    "hidden_act": (("silu", None), "the experts are gated with SiLU"),
    "scoring_func": (("sigmoid", None), "the router's scores are sigmoids"),
    "topk_method": (("noaux_tc", None), "experts are chosen with the correction bias"),
    "moe_layer_freq": ((1, None), "every layer from first_k_dense_replace on has experts"),
}


def _broken_rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    yield from fixed_values(hf, _EPS)
    yield from latent_rules(hf)
    if hf["v_head_dim"] > (width := hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]) and has_megatron("0.19", otherwise=False):
        reason = "with packed sequences this version of Megatron pads values to the width of queries, and cuts wider ones"
        yield BrokenRule(f"needs v_head_dim of at most {width} with megatron-core 0.19", reason, "megatron-core 0.16.1")


def latent_rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Rules of latent attention with these experts, in every family that has both."""
    yield from fixed_values(hf, _FIXED)
    yield from group_limit(hf)
    yield from _rope_rules(hf)
    if hf["num_key_value_heads"] != hf["num_attention_heads"]:
        reason = "every head has keys and values of its own, made from the shared latent"
        yield BrokenRule(f"needs num_key_value_heads={hf['num_attention_heads']}, as many as heads", reason, "correct config.json")
    if hf.get("head_dim") not in (None, hf["qk_rope_head_dim"]):
        reason = "transformers turns head_dim channels, and the others are not rotary"
        yield BrokenRule(f"needs head_dim={hf['qk_rope_head_dim']}, qk_rope_head_dim, or none", reason, "correct config.json")
    yield from last_layer_has_experts(hf)
    if hf["q_lora_rank"] is None and has_megatron("0.19", otherwise=False):
        reason = "without compressed queries this version of Megatron norms their input a second time"
        yield BrokenRule("needs q_lora_rank with megatron-core 0.19", reason, "megatron-core 0.16.1")
    yield from readable_weights(hf)


def _rope_rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    rope = rope_parameters(hf)
    kind = rope["rope_type"]
    yield from whole_heads(hf)
    if kind not in ("default", "yarn"):
        reason = "Megatron's latent attention has these two"
        yield BrokenRule(f"needs rope_type default or yarn in rope_scaling, not {kind!r}", reason, "another model of this type")
    if kind != "yarn":
        return
    if rope.get("attention_factor") is not None or rope.get("truncate") is False:
        reason = "Megatron derives the attention factor from mscale and always rounds the range of corrected frequencies"
        fix = "another model of this type"
        yield BrokenRule("must leave attention_factor and truncate of rope_scaling at their defaults", reason, fix)
    if rope.get("mscale_all_dim") and not rope.get("mscale"):
        reason = "without mscale transformers ignores mscale_all_dim in one of two places"
        yield BrokenRule("needs mscale beside mscale_all_dim in rope_scaling", reason, "mscale=1.0 if the model was trained so")


DEEPSEEK_V3 = Family(
    rules=(
        *ends(repeated_by_mtp=True),
        *latent_layer(LAYER, HF_LAYER),
        *latent_layer(f"{MTP}.transformer_layer", HF_MTP),
        *mtp_ends(),
    ),
    transformer_config=latent_config,
    broken_rules=_broken_rules,
    rotary=latent_rotary,
)
KIMI_K2 = replace(DEEPSEEK_V3, served=Served(computed_as="deepseek_v3"))
"""Kimi-K2 (1T): other sizes, no groups of experts, no multi-token prediction. transformers has no class of this model_type; published
checkpoints bring DeepSeek-V3's as their own code."""
