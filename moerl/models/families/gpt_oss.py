"""gpt-oss (20b, 120b) in bfloat16: windows in every other layer, learned sinks, biases everywhere, clamped gates, experts in stacks."""

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.models.families.parts.family import BrokenRule, Family, Rule, Served
from moerl.models.families.parts.family_checks import (
    SILU,
    Fixed,
    fixed_values,
    readable_weights,
    several_softmax_experts,
    written,
)
from moerl.models.families.parts.layer_rules import (
    HF_LAYER,
    LAYER,
    attention,
    attention_fields,
    decoder_fields,
    ends,
    softmax_router_fields,
)
from moerl.models.families.parts.rope import rope_parameters, whole_heads

_GATES: Fixed = {"swiglu_alpha": ((1.702, None), "Megatron's quick_gelu has this value in its source")}
_BIASES: Fixed = {"attention_bias": ((True, None), "Megatron adds biases to all projections of a layer or to none")}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def layer_types(hf: Mapping[str, Any]) -> list[str]:
    """Type of each layer. Not written: windows first, then in every other layer (transformers, models/gpt_oss/configuration_gpt_oss.py)."""
    given = hf.get("layer_types")
    return [(_SLIDING, _FULL)[layer % 2] for layer in range(hf["num_hidden_layers"])] if given is None else given


def _config(hf: Mapping[str, Any]) -> dict[str, Any]:
    router = softmax_router_fields(hf, normalised=True, experts="num_local_experts", ffn_size="intermediate_size")
    gates = {"activation_func": "quick_gelu", "glu_linear_offset": 1.0, "activation_func_clamp_value": hf.get("swiglu_limit", 7.0)}
    windows = {
        "window_size": (hf["sliding_window"] - 1, 0),  # transformers counts the query's own position, Megatron those before it
        "window_attn_skip_freq": [int(kind == _SLIDING) for kind in layer_types(hf)],
    }
    return decoder_fields(hf) | attention_fields(hf, has_bias=True) | router | gates | windows | {
        "add_bias_linear": True,
        "softmax_type": "learnable",
        **_yarn(hf),
    }  # fmt: skip


def _yarn(hf: Mapping[str, Any]) -> dict[str, Any]:
    rope = rope_parameters(hf)
    return {
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope.get("beta_fast", 32.0),
        "yarn_beta_slow": rope.get("beta_slow", 1.0),
        "yarn_mscale": None,  # transformers multiplies by 0.1 ln(factor) + 1, which is what Megatron does without these two
        "yarn_mscale_all_dim": None,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }


def _rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"position_embedding_type": "yarn", "rotary_base": rope_parameters(hf)["rope_theta"], "rotary_percent": 1.0}


def _rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    yield from fixed_values(hf, {**SILU, **_GATES, **_BIASES})
    yield from readable_weights(hf)
    yield from written(hf, "num_key_value_heads")
    yield from whole_heads(hf)
    yield from several_softmax_experts(hf)
    yield from written(hf, "head_dim")
    if (kind := rope_parameters(hf)["rope_type"]) != "yarn":
        yield BrokenRule(f"needs rope_type yarn in rope_scaling, not {kind!r}", "the family's table has no other", "a published gpt-oss")
    for name in ("mscale", "mscale_all_dim", "attention_factor"):
        if rope_parameters(hf).get(name) is not None:
            reason = "the family's table has 0.1 ln(factor) + 1, as published models do"
            yield BrokenRule(f"must not have {name} in rope_scaling", reason, "a published gpt-oss")
    if not hf.get("sliding_window"):
        yield BrokenRule(f"needs a sliding_window, not {hf.get('sliding_window')!r}", "its layers have windows", "a published gpt-oss")
    if len(kinds := layer_types(hf)) != hf["num_hidden_layers"] or not {*kinds} <= {_FULL, _SLIDING}:
        rule = f"needs {_FULL} or {_SLIDING} in layer_types for each of its {hf['num_hidden_layers']} layers"
        yield BrokenRule(rule, f"found {kinds}", "another model of this type")


def _experts(megatron: str, hf: str) -> tuple[Rule, ...]:
    block, stack = f"{megatron}.mlp", f"{hf}.mlp.experts"
    return (
        Rule(megatron=f"{megatron}.pre_mlp_layernorm.weight", hf=(f"{hf}.post_attention_layernorm.weight",)),
        *(Rule(megatron=f"{block}.router.{kind}", hf=(f"{hf}.mlp.router.{kind}",)) for kind in ("weight", "bias")),
        Rule(
            megatron=f"{block}.experts.linear_fc1.weight{{expert}}", hf=(f"{stack}.gate_up_proj[{{expert}}]",), shard="alternating_columns"
        ),
        Rule(megatron=f"{block}.experts.linear_fc1.bias{{expert}}", hf=(f"{stack}.gate_up_proj_bias[{{expert}}]",), shard="alternating"),
        Rule(megatron=f"{block}.experts.linear_fc2.weight{{expert}}", hf=(f"{stack}.down_proj[{{expert}}]",), shard="transposed_row"),
        Rule(megatron=f"{block}.experts.linear_fc2.bias{{expert}}", hf=(f"{stack}.down_proj_bias[{{expert}}]",)),
    )


GPT_OSS = Family(
    rules=(
        *ends(),
        *attention(has_bias=True),
        Rule(megatron=f"{LAYER}.self_attention.linear_proj.bias", hf=(f"{HF_LAYER}.self_attn.o_proj.bias",)),
        Rule(megatron=f"{LAYER}.self_attention.core_attention.softmax_offset", hf=(f"{HF_LAYER}.self_attn.sinks",), shard="column"),
        *_experts(LAYER, HF_LAYER),
    ),
    transformer_config=_config,
    broken_rules=_rules,
    rotary=_rotary,
    served=Served(router="router", has_stacks=True, has_windows=True),
)
