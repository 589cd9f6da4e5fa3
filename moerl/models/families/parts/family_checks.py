"""Rules that several families share: what their config.json may say so that Megatron computes the same."""

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from moerl.models.families.parts.family import BrokenRule

Fixed = Mapping[str, tuple[tuple[Any, ...], str]]
"""Name in config.json -> the values it may have (None: absent) and why."""

SILU: Fixed = {"hidden_act": (("silu", None), "MLPs are gated with SiLU")}
NO_BIAS: Fixed = {"attention_bias": ((False, None), "transformers adds a bias to the output projection too, which Megatron ties to MLPs'")}
FULL_ATTENTION: Fixed = {
    "use_sliding_window": ((False, None), "Megatron's pattern of windows (window_attn_skip_freq) is not that of max_window_layers")
}


def fixed_values(hf: Mapping[str, Any], fixed: Fixed) -> Iterator[BrokenRule]:
    for name, (allowed, reason) in fixed.items():
        value = hf.get(name)
        if value not in allowed:
            yield BrokenRule(f"needs {name}={allowed[0]!r} in config.json, not {value!r}", reason, "another model of this type")


def is_in_fp8_blocks(hf: Mapping[str, Any]) -> bool:
    """Whether weights are stored as DeepSeek-V3's, in blocks of 128 x 128 with a scale each (moerl/models/fp8_blocks.py)."""
    quantization = hf.get("quantization_config") or {}
    kind = tuple(quantization.get(name) for name in ("quant_method", "weight_block_size", "fmt"))
    return kind in (("fp8", [128, 128], "e4m3"), ("fp8", [128, 128], None))


def readable_weights(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    if hf.get("quantization_config") is not None and not is_in_fp8_blocks(hf):
        reason = "its weights are stored quantized in another way, and of those moerl reads FP8 in blocks of 128 x 128 alone"
        fix = "moerl convert SRC DST --dtype bfloat16, and DST as model.path"
        yield BrokenRule("must not be quantized (quantization_config)", reason, fix)


def has_megatron(least: str, *, otherwise: bool) -> bool:
    """Whether Megatron-Core is installed here in that version or a newer one; `otherwise`: if it is not installed at all."""
    try:
        return Version(version("megatron-core")) >= Version(least)
    except PackageNotFoundError:
        return otherwise


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


def several_experts(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Rule of routers whose scores are sigmoids."""
    if (chosen := hf["num_experts_per_tok"]) < 2:
        reason = "with one expert Megatron does not normalise its weight, transformers does"
        yield BrokenRule(f"needs num_experts_per_tok of at least 2, not {chosen}", reason, "another model of this type")


def last_layer_has_experts(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    if hf["first_k_dense_replace"] >= hf["num_hidden_layers"]:
        reason = "the last layer must have experts: the layers of multi-token prediction are built like it"
        rule = f"needs first_k_dense_replace below num_hidden_layers={hf['num_hidden_layers']}"
        yield BrokenRule(rule, reason, "a model with experts")


def experts_in_every_layer(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    if hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers"):
        reason = "the family's table has experts in every layer"
        yield BrokenRule("needs decoder_sparse_step=1 and no mlp_only_layers in config.json", reason, "another model of this type")
