"""Parts of families whose routers choose experts by sigmoid scores and a bias, as DeepSeek-V3 and after it others: rules, fields, checks.

With them come layers of multi-token prediction, which the same families publish.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.models.families.parts.family import BrokenRule, Rule
from moerl.models.families.parts.layer_rules import HF_MTP, MTP, PLAIN_ROUTER, experts, gated_mlp


def mtp_ends() -> tuple[Rule, ...]:
    """Tensors that a layer of multi-token prediction has beside a decoder layer, as published by DeepSeek and after them by others."""
    return (
        Rule(megatron=f"{MTP}.enorm.weight", hf=(f"{HF_MTP}.enorm.weight",)),
        Rule(megatron=f"{MTP}.hnorm.weight", hf=(f"{HF_MTP}.hnorm.weight",)),
        Rule(megatron=f"{MTP}.eh_proj.weight", hf=(f"{HF_MTP}.eh_proj.weight",), shard="column"),
        Rule(megatron=f"{MTP}.final_layernorm.weight", hf=(f"{HF_MTP}.shared_head.norm.weight",)),
    )


def biased_experts(megatron: str, hf: str) -> tuple[Rule, ...]:
    """Experts chosen with a correction bias, beside shared ones."""
    return (
        *experts(megatron, hf),
        Rule(megatron=f"{megatron}.mlp.router.expert_bias", hf=(f"{hf}.mlp.gate.e_score_correction_bias",), is_float32=True),
        *gated_mlp(f"{megatron}.mlp.shared_experts", f"{hf}.mlp.shared_experts"),
    )


def sigmoid_router_fields(hf: Mapping[str, Any], *, experts: str, ffn_size: str) -> dict[str, Any]:
    """Experts in every layer, chosen with a bias by scores of their own; the weights of the chosen ones add up to 1. `experts`, `ffn_size`:
    as for `softmax_router_fields`."""
    return {
        "num_moe_experts": hf[experts],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf[ffn_size],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_layer_freq": 1,
        **PLAIN_ROUTER,
    }


def grouped_router_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Experts from layer first_k_dense_replace on, as in DeepSeek-V3: sigmoid routers that choose within groups, beside shared experts."""
    dense_layers, is_limited = hf["first_k_dense_replace"], hf["topk_group"] != hf["n_group"]
    return sigmoid_router_fields(hf, experts="n_routed_experts", ffn_size="moe_intermediate_size") | {
        "moe_shared_expert_intermediate_size": hf["moe_intermediate_size"] * hf["n_shared_experts"],
        "moe_router_num_groups": hf["n_group"] if is_limited else None,
        "moe_router_group_topk": hf["topk_group"] if is_limited else None,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_layer_freq": [0] * dense_layers + [1] * (hf["num_hidden_layers"] - dense_layers),
    }


def several_experts(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Rule of routers whose scores are sigmoids."""
    if (chosen := hf["num_experts_per_tok"]) < 2:
        reason = "with one expert Megatron does not normalise its weight, transformers does"
        yield BrokenRule(f"needs num_experts_per_tok of at least 2, not {chosen}", reason, "another model of this type")


def group_limit(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Rules of routers with n_group and topk_group: transformers' scores of groups must be Megatron's."""
    chosen, groups, kept = (hf[name] for name in ("num_experts_per_tok", "n_group", "topk_group"))
    yield from several_experts(hf)
    if hf["n_routed_experts"] % groups:
        rule = f"needs n_group={groups} to divide n_routed_experts={hf['n_routed_experts']}"
        yield BrokenRule(rule, "groups are equal", "another model")
    if kept != groups and chosen // kept != 2:
        reason = "transformers scores a group by its 2 best experts, Megatron by its num_experts_per_tok // topk_group best"
        fix = "a model where these agree, or where topk_group equals n_group"
        yield BrokenRule(f"needs num_experts_per_tok // topk_group = 2, not {chosen} // {kept}", reason, fix)


def last_layer_has_experts(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    if hf["first_k_dense_replace"] >= hf["num_hidden_layers"]:
        reason = "the last layer must have experts: the layers of multi-token prediction are built like it"
        rule = f"needs first_k_dense_replace below num_hidden_layers={hf['num_hidden_layers']}"
        yield BrokenRule(rule, reason, "a model with experts")
