"""Qwen2 and Qwen2.5, dense (0.5B to 72B): biases of queries, keys and values. Names: transformers, models/qwen2/modeling_qwen2.py."""

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.models.checks import FULL_ATTENTION, SILU, fixed_values, plain_weights
from moerl.models.family import BrokenRule, Family
from moerl.models.layers import HF_LAYER, LAYER, attention, attention_fields, decoder_fields, dense, ends
from moerl.models.rope import rope_rules, rotary


def _config(hf: Mapping[str, Any]) -> dict[str, Any]:
    return decoder_fields(hf) | attention_fields(hf, has_bias=True)


def _rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    yield from fixed_values(hf, {**SILU, **FULL_ATTENTION})
    yield from rope_rules(hf)
    yield from plain_weights(hf)


QWEN2 = Family(
    rules=(*ends(), *attention(LAYER, HF_LAYER, has_bias=True), *dense(LAYER, HF_LAYER)),
    transformer_config=_config,
    broken_rules=_rules,
    rotary=rotary,
)
