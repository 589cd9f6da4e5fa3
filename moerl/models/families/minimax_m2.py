"""MiniMax-M2, M2.1, M2.5 (230B-A10B): norms of queries and keys over all heads at once, half of a head rotary, sigmoid routers with a bias.

Names: transformers, models/minimax_m2/modeling_minimax_m2.py, and those of published checkpoints, which are Mixtral's.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.models.families.parts.family import BrokenRule, Family, Rule, Served
from moerl.models.families.parts.family_checks import (
    NO_WINDOW,
    SILU,
    Fixed,
    fixed_values,
    readable_weights,
    written,
)
from moerl.models.families.parts.layer_rules import HF_LAYER, LAYER, attention, attention_fields, decoder_fields, ends, experts
from moerl.models.families.parts.rope import rope_rules, rotary
from moerl.models.families.parts.sigmoid_routers import several_experts, sigmoid_router_fields

_SERVED = Served(block="block_sparse_moe", projections=("w1", "w3", "w2"))
_FIXED: Fixed = {
    **SILU,
    **NO_WINDOW,
    "use_qk_norm": ((True, None), "the family's table has the norms"),
    "qk_norm_type": (("per_layer", None), "norms are over all heads of a layer; of single heads they are another model"),
    "scoring_func": (("sigmoid", None), "the router's scores are sigmoids"),
    "use_routing_bias": ((True, None), "experts are chosen with the correction bias"),
    "shared_intermediate_size": ((0, None), "the family's table has no shared experts"),
    "router_jitter_noise": ((0.0, None), "log-probs of one sample must not differ from pass to pass"),
}


def _config(hf: Mapping[str, Any]) -> dict[str, Any]:
    router = sigmoid_router_fields(hf, experts="num_local_experts", ffn_size="intermediate_size")
    return decoder_fields(hf) | attention_fields(hf, has_qk_norm=True) | router | {"qk_norm_over_heads": True}


def _rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Published files count the rotary channels of a head; transformers 5 writes their share."""
    return rotary(hf if hf.get("rotary_dim") is None else {"partial_rotary_factor": hf["rotary_dim"] / hf["head_dim"], **hf})


def _rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    yield from fixed_values(hf, _FIXED)
    yield from several_experts(hf)
    yield from rope_rules(hf, turns_part=True)
    yield from readable_weights(hf)
    yield from written(hf, "num_key_value_heads", "head_dim")
    if 0 in (hf.get("attn_type_list") or ()):
        reason = "0 is linear attention, which MiniMax-M1 has and this family's table has not"
        yield BrokenRule("needs attn_type_list to be all 1 in config.json", reason, "a published MiniMax-M2")


MINIMAX_M2 = Family(
    rules=(
        *ends(),
        *attention(has_qk_norm=True),
        *experts(served=_SERVED),
        Rule(
            megatron=f"{LAYER}.mlp.router.expert_bias",
            hf=(f"{HF_LAYER}.{_SERVED.block}.e_score_correction_bias",),
            is_float32=True,
        ),
    ),
    transformer_config=_config,
    broken_rules=_rules,
    rotary=_rotary,
    served=_SERVED,
)
