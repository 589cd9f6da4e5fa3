"""GLM-4.5, 4.6, 4.7 (355B-A32B) and GLM-4.5-Air (106B-A12B): routers and multi-token prediction of DeepSeek-V3, grouped-query attention.

Half of a head's channels are rotary, queries, keys and values have biases, and all but Air norm queries and keys. Names: transformers,
models/glm4_moe/modeling_glm4_moe.py; the layers of multi-token prediction are named as DeepSeek's.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.models.families.parts.family import BrokenRule, Family, Rule
from moerl.models.families.parts.family_checks import NO_WINDOW, SILU, Fixed, fixed_values, readable_weights, written
from moerl.models.families.parts.layer_rules import HF_LAYER, HF_MTP, LAYER, MTP, attention, attention_fields, decoder_fields, dense, ends
from moerl.models.families.parts.rope import rope_rules, rotary
from moerl.models.families.parts.sigmoid_routers import biased_experts, group_limit, grouped_router_fields, last_layer_has_experts, mtp_ends


def _layer(megatron: str, hf: str) -> tuple[Rule, ...]:
    return (*attention(megatron, hf, has_bias=True, has_qk_norm=True), *dense(megatron, hf), *biased_experts(megatron, hf))


def _config(hf: Mapping[str, Any]) -> dict[str, Any]:
    attends = attention_fields(hf, has_bias=hf.get("attention_bias", False), has_qk_norm=hf.get("use_qk_norm", False))
    return decoder_fields(hf) | attends | grouped_router_fields(hf)


def _rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
    """transformers turns half of the channels unless config.json says otherwise."""
    return rotary({"partial_rotary_factor": 0.5, **hf})


_FIXED: Fixed = {
    "norm_topk_prob": ((True, None), "Megatron normalises the weights of the chosen experts whenever scores are sigmoids"),
    "tie_word_embeddings": ((False, None), "Megatron cannot save an output layer tied to an embedding that multi-token prediction shares"),
    **SILU,
    **NO_WINDOW,
}


def _broken_rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    yield from fixed_values(hf, _FIXED)
    yield from group_limit(hf)
    yield from last_layer_has_experts(hf)
    yield from rope_rules(hf, turns_part=True)
    yield from readable_weights(hf)
    yield from written(hf, "num_key_value_heads")


GLM4_MOE = Family(
    rules=(
        *ends(repeated_by_mtp=True),
        *_layer(LAYER, HF_LAYER),
        *_layer(f"{MTP}.transformer_layer", HF_MTP),
        *mtp_ends(),
    ),
    transformer_config=_config,
    broken_rules=_broken_rules,
    rotary=_rotary,
)
