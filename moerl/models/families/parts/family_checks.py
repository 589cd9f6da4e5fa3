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
NO_WINDOW: Fixed = {"sliding_window": ((None, 0), "attention of this family sees every position in Megatron, and would not on servers")}


def fixed_values(hf: Mapping[str, Any], fixed: Fixed) -> Iterator[BrokenRule]:
    for name, (allowed, reason) in fixed.items():
        value = hf.get(name)
        if value not in allowed:
            yield BrokenRule(f"needs {name}={allowed[0]!r} in config.json, not {value!r}", reason, "another model of this type")


def written(hf: Mapping[str, Any], *names: str) -> Iterator[BrokenRule]:
    for name in names:
        if hf.get(name) is None:
            reason = "transformers has a number of its own for this type where none is written, whatever the other sizes are"
            beside = "num_key_value_heads" if name == "head_dim" else "head_dim"
            yield BrokenRule(f"needs {name} in config.json", reason, f"the one that the weights have: rows of k_proj / {beside}")


def is_in_fp8_blocks(hf: Mapping[str, Any]) -> bool:
    """Whether weights are stored as DeepSeek-V3's, in blocks of 128 x 128 with a scale each (moerl/models/fp8_blocks.py). MiniMax-M2 calls
    the same format float8_e4m3fn."""
    quantization = hf.get("quantization_config") or {}
    kind = tuple(quantization.get(name) for name in ("quant_method", "weight_block_size", "fmt"))
    return kind[:2] == ("fp8", [128, 128]) and kind[2] in ("e4m3", "float8_e4m3fn", None)


def readable_weights(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    if hf.get("quantization_config") is not None and not is_in_fp8_blocks(hf):
        reason = "its weights are stored quantized in another way, and of those moerl reads FP8 in blocks of 128 x 128 alone"
        fix = "the unquantized checkpoint: moerl convert has no method for this one"
        if hf["quantization_config"].get("quant_method") == "mxfp4":
            fix = "moerl convert SRC DST --dtype bfloat16, and DST as model.path"
        yield BrokenRule("must not be quantized (quantization_config)", reason, fix)


def has_megatron(least: str, *, otherwise: bool) -> bool:
    """Whether Megatron-Core is installed here in that version or a newer one; `otherwise`: if it is not installed at all."""
    try:
        return Version(version("megatron-core")) >= Version(least)
    except PackageNotFoundError:
        return otherwise


def several_softmax_experts(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Rule of routers that normalise softmax weights of the chosen experts."""
    if (chosen := hf["num_experts_per_tok"]) < 2:
        reason = "the weight of a single expert would be 1 whatever the router says, and Megatron builds no such router"
        yield BrokenRule(f"needs num_experts_per_tok of at least 2, not {chosen}", reason, "another model of this type")


def experts_in_every_layer(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    if hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers"):
        reason = "the family's table has experts in every layer"
        yield BrokenRule("needs decoder_sparse_step=1 and no mlp_only_layers in config.json", reason, "another model of this type")
