"""Qwen3, dense and mixture of experts (0.6B to 235B-A22B). Names: transformers, models/qwen3*/modeling_*.py."""

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.models.families.parts.family import BrokenRule, Family
from moerl.models.families.parts.family_checks import (
    FULL_ATTENTION,
    NO_BIAS,
    SILU,
    experts_in_every_layer,
    fixed_values,
    readable_weights,
    several_softmax_experts,
    written,
)
from moerl.models.families.parts.layer_rules import attention, attention_fields, decoder_fields, dense, ends, experts, softmax_router_fields
from moerl.models.families.parts.rope import rope_rules, rotary

_COMMON = (*ends(), *attention(has_qk_norm=True))


def _dense_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    return decoder_fields(hf) | attention_fields(hf, has_qk_norm=True)


def _moe_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    number = "num_local_experts" if "num_local_experts" in hf else "num_experts"  # the former since transformers 5
    return _dense_config(hf) | softmax_router_fields(hf, normalised=hf["norm_topk_prob"], experts=number)


def _dense_rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    yield from _common_rules(hf)
    yield from written(hf, "head_dim")


def _common_rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    yield from fixed_values(hf, {**SILU, **NO_BIAS, **FULL_ATTENTION})
    yield from rope_rules(hf)
    yield from readable_weights(hf)
    yield from written(hf, "num_key_value_heads")


def _moe_rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    yield from _common_rules(hf)
    yield from experts_in_every_layer(hf)
    if hf["norm_topk_prob"]:
        yield from several_softmax_experts(hf)


QWEN3 = Family(rules=_COMMON + dense(), transformer_config=_dense_config, broken_rules=_dense_rules, rotary=rotary)
QWEN3_MOE = Family(rules=_COMMON + experts(), transformer_config=_moe_config, broken_rules=_moe_rules, rotary=rotary)
