"""Mixtral (8x7B, 8x22B). Names: published checkpoints, which call a layer of experts block_sparse_moe; transformers 5 calls it mlp."""

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.models.families.parts.family import BrokenRule, Family, Served
from moerl.models.families.parts.family_checks import (
    NO_WINDOW,
    SILU,
    fixed_values,
    readable_weights,
    several_softmax_experts,
    written,
)
from moerl.models.families.parts.layer_rules import attention, attention_fields, decoder_fields, ends, experts, softmax_router_fields
from moerl.models.families.parts.rope import rope_rules, rotary

_SERVED = Served(block="block_sparse_moe", projections=("w1", "w3", "w2"))


def _config(hf: Mapping[str, Any]) -> dict[str, Any]:
    router = softmax_router_fields(hf, normalised=True, experts="num_local_experts", ffn_size="intermediate_size")
    return decoder_fields(hf) | attention_fields(hf) | router


def _rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    jitter = {"router_jitter_noise": ((0.0, None), "log-probs of one sample must not differ from pass to pass")}
    yield from fixed_values(hf, {**SILU, **NO_WINDOW, **jitter})
    yield from rope_rules(hf)
    yield from several_softmax_experts(hf)
    yield from readable_weights(hf)
    yield from written(hf, "num_key_value_heads")


MIXTRAL = Family(
    rules=(
        *ends(),
        *attention(),
        *experts(served=_SERVED),
    ),
    transformer_config=_config,
    broken_rules=_rules,
    rotary=rotary,
    served=_SERVED,
)
