"""Llama 2, 3, 3.1 to 3.3, and models of their shape such as SmolLM2. Names: transformers, models/llama/modeling_llama.py."""

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.models.families.parts.family import BrokenRule, Family
from moerl.models.families.parts.family_checks import NO_BIAS, NO_WINDOW, SILU, fixed_values, readable_weights
from moerl.models.families.parts.layer_rules import attention, attention_fields, decoder_fields, dense, ends
from moerl.models.families.parts.rope import rope_parameters, rope_rules, rotary


def _config(hf: Mapping[str, Any]) -> dict[str, Any]:
    return decoder_fields(hf) | attention_fields(hf)


def _rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    no_mlp_bias = {"mlp_bias": ((False, None), "Megatron has biases in all its projections or in none")}
    yield from fixed_values(hf, {**SILU, **NO_BIAS, **NO_WINDOW, **no_mlp_bias})
    yield from rope_rules(hf, kinds=("default", "llama3"))
    yield from readable_weights(hf)


def _rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 2 writes no rope_theta: transformers' default."""
    return rotary(hf if "rope_theta" in rope_parameters(hf) else {**hf, "rope_theta": 10000.0})


LLAMA = Family(rules=(*ends(), *attention(), *dense()), transformer_config=_config, broken_rules=_rules, rotary=_rotary)
