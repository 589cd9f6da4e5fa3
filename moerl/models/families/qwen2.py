"""Qwen2 and Qwen2.5, dense (0.5B to 72B) and Qwen2-MoE (Qwen1.5-MoE-A2.7B, 57B-A14B): biases of queries, keys and values.

Shared experts have a gate. Names: transformers, models/qwen2*/modeling_*.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.models.families.parts.family import BrokenRule, Family
from moerl.models.families.parts.family_checks import (
    FULL_ATTENTION,
    SILU,
    experts_in_every_layer,
    fixed_values,
    readable_weights,
    several_softmax_experts,
    written,
)
from moerl.models.families.parts.layer_rules import (
    attention,
    attention_fields,
    decoder_fields,
    dense,
    ends,
    experts,
    gated_shared_expert,
    softmax_router_fields,
)
from moerl.models.families.parts.rope import rope_rules, rotary

_COMMON = (*ends(), *attention(has_bias=True))


def _dense_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    return decoder_fields(hf) | attention_fields(hf, has_bias=True)


def _moe_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    router = softmax_router_fields(hf, normalised=hf.get("norm_topk_prob", False))
    shared = {"moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"], "moe_shared_expert_gate": True}
    return decoder_fields(hf) | attention_fields(hf, has_bias=hf.get("qkv_bias", True)) | router | shared


def _dense_rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    yield from fixed_values(hf, {**SILU, **FULL_ATTENTION})
    yield from rope_rules(hf)
    yield from readable_weights(hf)
    yield from written(hf, "num_key_value_heads")


def _moe_rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    yield from _dense_rules(hf)
    yield from experts_in_every_layer(hf)
    if hf.get("norm_topk_prob"):
        yield from several_softmax_experts(hf)


QWEN2 = Family(rules=_COMMON + dense(), transformer_config=_dense_config, broken_rules=_dense_rules, rotary=rotary)
QWEN2_MOE = Family(
    rules=_COMMON + experts() + gated_shared_expert(),
    transformer_config=_moe_config,
    broken_rules=_moe_rules,
    rotary=rotary,
)
