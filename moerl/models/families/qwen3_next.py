"""Qwen3-Next (80B-A3B): gated delta nets in three of four layers, gated attention in the others, norms around zero, a gated shared expert.

Names: transformers, models/qwen3_next/modeling_qwen3_next.py. The layers of multi-token prediction that are published as mtp.* have
another form than DeepSeek's: they are neither built nor exported.
"""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from moerl.models.families.parts.family import BrokenRule, Family, Rule
from moerl.models.families.parts.family_checks import (
    NO_WINDOW,
    SILU,
    Fixed,
    experts_in_every_layer,
    fixed_values,
    has_megatron,
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
    experts,
    gated_shared_expert,
    softmax_router_fields,
)
from moerl.models.families.parts.rope import rope_rules, rotary

FULL, LINEAR = "full_attention", "linear_attention"
_FIXED: Fixed = {
    **SILU,
    **NO_WINDOW,
    "attention_bias": ((False, None), "Megatron adds biases to all projections of a layer or to none"),
}
_SIZES = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")


def layer_types(hf: Mapping[str, Any]) -> list[str]:
    """Type of each layer. Not written: attention in each full_attention_interval-th (transformers, configuration_qwen3_next.py)."""
    if (given := hf.get("layer_types")) is not None:
        return given
    interval = hf.get("full_attention_interval", 4)
    return [LINEAR if (layer + 1) % interval else FULL for layer in range(hf["num_hidden_layers"])]


def _config(hf: Mapping[str, Any]) -> dict[str, Any]:
    router = softmax_router_fields(hf, normalised=hf["norm_topk_prob"])
    return decoder_fields(hf) | attention_fields(hf, has_qk_norm=True) | router | {
        "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == LINEAR) for kind in layer_types(hf)],
        **{f"linear_{name}": hf[f"linear_{name}"] for name in _SIZES},
    }  # fmt: skip


def _rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
    """transformers turns a quarter of the channels unless config.json says otherwise."""
    return rotary({"partial_rotary_factor": 0.25, **hf})


def _rules(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    yield from fixed_values(hf, _FIXED)
    yield from experts_in_every_layer(hf)
    yield from rope_rules(hf, turns_part=True)
    yield from readable_weights(hf)
    yield from written(hf, "num_key_value_heads", "head_dim")
    if hf["norm_topk_prob"]:
        yield from several_softmax_experts(hf)
    if not has_megatron("0.19", otherwise=True):
        reason = "gated delta nets of older versions refuse packed sequences, of which all batches consist"
        yield BrokenRule("needs megatron-core 0.19 or newer", reason, "Python 3.12 with the pins of constraints-py312.txt")
    if find_spec("transformer_engine") is not None and find_spec("fla") is None:
        reason = "Megatron's gated delta nets call its kernels; the reference on CPU stands in for both or none"
        yield BrokenRule("needs flash-linear-attention beside Transformer Engine", reason, "pip install flash-linear-attention")
    if len(kinds := layer_types(hf)) != hf["num_hidden_layers"] or not {*kinds} <= {FULL, LINEAR}:
        rule = f"needs {FULL} or {LINEAR} in layer_types for each of its {hf['num_hidden_layers']} layers"
        yield BrokenRule(rule, f"found {kinds}", "another model of this type")
    if hf["linear_num_value_heads"] % hf["linear_num_key_heads"]:
        rule = f"needs linear_num_value_heads to be a multiple of linear_num_key_heads={hf['linear_num_key_heads']}"
        yield BrokenRule(rule, "value heads share key heads evenly", "another model of this type")


def _delta_net(megatron: str, hf: str) -> tuple[Rule, ...]:
    """Whole on every rank: there is no tensor parallelism (config/rules/parallel_rules.py)."""
    ours, theirs = f"{megatron}.self_attention", f"{hf}.linear_attn"
    same = {"conv1d.weight": "conv1d.weight", "dt_bias": "dt_bias", "A_log": "A_log", "out_norm.weight": "norm.weight"}
    return (
        Rule(megatron=f"{ours}.in_proj.layer_norm_weight", hf=(f"{hf}.input_layernorm.weight",)),
        Rule(megatron=f"{ours}.in_proj.weight", hf=(f"{theirs}.in_proj_qkvz.weight", f"{theirs}.in_proj_ba.weight"), shard="delta_inputs"),
        *(Rule(megatron=f"{ours}.{name}", hf=(f"{theirs}.{their}",)) for name, their in same.items()),
        Rule(megatron=f"{ours}.out_proj.weight", hf=(f"{theirs}.out_proj.weight",), shard="row"),
    )


QWEN3_NEXT = Family(
    rules=(
        *ends(),
        *attention(has_qk_norm=True, shard="gated_qkv"),
        *_delta_net(LAYER, HF_LAYER),
        *experts(),
        *gated_shared_expert(),
    ),
    transformer_config=_config,
    broken_rules=_rules,
    rotary=_rotary,
    left_out=("mtp.",),
)
