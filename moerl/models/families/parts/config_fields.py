"""Types and bounds of what a config.json says, before anybody computes with it: a file may say anything.

Bounds are far above every published model, and low enough that products of sizes fit into 63 bits and names of all tensors into memory.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from moerl.models.families.parts.family import BrokenRule

_SIZES: Mapping[str, tuple[int, int]] = {
    "num_hidden_layers": (1, 10_000), "hidden_size": (1, 2**20), "intermediate_size": (1, 2**22), "num_attention_heads": (1, 2**16),
    "vocab_size": (1, 2**28), "max_position_embeddings": (1, 2**40), "num_experts": (1, 2**16), "num_local_experts": (1, 2**16),
    "n_routed_experts": (1, 2**16), "num_experts_per_tok": (1, 2**16), "moe_intermediate_size": (1, 2**22), "kv_lora_rank": (1, 2**20),
    "shared_expert_intermediate_size": (1, 2**22), "n_shared_experts": (1, 2**12), "first_k_dense_replace": (0, 10_000),
    "n_group": (1, 2**16), "topk_group": (1, 2**16), "qk_nope_head_dim": (1, 2**16), "qk_rope_head_dim": (1, 2**16),
    "v_head_dim": (1, 2**16), "index_n_heads": (1, 2**16), "index_head_dim": (1, 2**16), "index_topk": (1, 2**40),
    "linear_conv_kernel_dim": (1, 2**16), "linear_key_head_dim": (1, 2**16), "linear_value_head_dim": (1, 2**16),
    "linear_num_key_heads": (1, 2**16), "linear_num_value_heads": (1, 2**16), "full_attention_interval": (1, 10_000),
}  # fmt: skip
_OPTIONAL_SIZES: Mapping[str, tuple[int, int]] = {
    "num_key_value_heads": (1, 2**16), "head_dim": (1, 2**16), "q_lora_rank": (1, 2**20), "num_nextn_predict_layers": (0, 1000),
    "sliding_window": (0, 2**40), "rotary_dim": (1, 2**16), "original_max_position_embeddings": (1, 2**40),
}  # fmt: skip
_NUMBERS = ("rms_norm_eps", "rope_theta", "routed_scaling_factor", "initializer_range", "swiglu_limit", "partial_rotary_factor")
_OF_ROPE = (
    "rope_theta", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "low_freq_factor", "high_freq_factor",
    "partial_rotary_factor",
)  # fmt: skip
_SECTIONS = ("rope_scaling", "rope_parameters", "quantization_config")
_LISTS = ("architectures", "layer_types", "mlp_only_layers", "mlp_layer_types", "indexer_types", "attn_type_list")
_MOST_EXPERTS = 2**20
"""Experts of all layers together: more than forty times those of Kimi-K2. Each has names of its own."""


def num_mtp_layers(hf: Mapping[str, Any]) -> int:
    """Layers of the multi-token prediction block by config.json."""
    number = hf.get("num_nextn_predict_layers")
    return 0 if number is None else number


def is_tied(hf: Mapping[str, Any]) -> bool:
    """The output layer is the embedding. Not written in some published config.json files of models where it is not."""
    return hf.get("tie_word_embeddings", False)


def broken_fields(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Settings that are there and of another type, or out of bounds."""
    for name, (least, most) in {**_SIZES, **_OPTIONAL_SIZES}.items():
        if name in hf and not (hf[name] is None and name in _OPTIONAL_SIZES):
            yield from _size(name, hf[name], least, most)
    for name in _NUMBERS:
        if hf.get(name) is not None and not _is_number(hf[name]):
            yield _broken(name, hf[name], "a number")
    for name in _SECTIONS:
        if hf.get(name) is not None and not isinstance(hf[name], Mapping):
            yield _broken(name, hf[name], "an object or null")
    for name in _LISTS:
        if hf.get(name) is not None and not (isinstance(hf[name], list) and all(isinstance(each, str | int) for each in hf[name])):
            yield _broken(name, hf[name], "a list of names or numbers, or null")
    for section in ("rope_scaling", "rope_parameters"):
        if isinstance(hf.get(section), Mapping):
            yield from _rope(section, hf[section])
    yield from _lost_theta(hf)
    yield from _all_experts(hf)
    yield from _heads(hf)


def _size(name: str, value: Any, least: int, most: int) -> Iterator[BrokenRule]:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        yield _broken(name, value, f"an integer from {least} to {most}")


def _rope(section: str, rope: Mapping[str, Any]) -> Iterator[BrokenRule]:
    for name in _OF_ROPE:
        if rope.get(name) is not None and not _is_number(rope[name]):
            yield _broken(f"{section}.{name}", rope[name], "a number")
    if rope.get("original_max_position_embeddings") is not None:
        yield from _size(f"{section}.original_max_position_embeddings", rope["original_max_position_embeddings"], 1, 2**40)


def _lost_theta(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    scaling, parameters = hf.get("rope_scaling"), hf.get("rope_parameters")
    if not isinstance(scaling, Mapping) or not isinstance(parameters, Mapping):
        return
    if scaling and "rope_theta" in parameters and not ("rope_theta" in hf or "rope_theta" in scaling):
        reason = "of the two transformers takes rope_scaling alone, and with it a rope_theta of its own"
        yield BrokenRule("needs rope_theta beside rope_scaling in config.json", reason, "rope_theta of rope_parameters written there too")


def _all_experts(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    layers = hf.get("num_hidden_layers")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = hf.get(name)
        if isinstance(layers, int) and isinstance(experts, int) and layers > 0 and layers * experts > _MOST_EXPERTS:
            yield _broken(name, experts, f"at most {_MOST_EXPERTS // layers} with num_hidden_layers={_shown(layers)}")
        chosen = hf.get("num_experts_per_tok")
        if _is_size(experts) and _is_size(chosen) and chosen > experts:
            yield _broken("num_experts_per_tok", chosen, f"at most {name}={_shown(experts)}")


def _heads(hf: Mapping[str, Any]) -> Iterator[BrokenRule]:
    heads: Any = hf.get("num_attention_heads")
    groups: Any = hf.get("num_key_value_heads")
    hidden: Any = hf.get("hidden_size")
    if _is_size(heads) and _is_size(groups) and heads % groups:
        yield _broken("num_attention_heads", heads, f"a multiple of num_key_value_heads={_shown(groups)}")
    if _is_size(heads) and _is_size(hidden) and hf.get("head_dim") is None and heads > hidden:
        yield _broken("num_attention_heads", heads, f"at most hidden_size={_shown(hidden)}, which heads share without head_dim")


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0


def _is_number(value: Any) -> bool:
    """Also none that overflows: JSON has integers of any length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30 and value == value


def _broken(name: str, value: Any, wanted: str) -> BrokenRule:
    rule = f"needs {name} to be {wanted} in config.json, not {_shown(value)}"
    return BrokenRule(rule, "no model has another", "copy the model's config.json again")


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else f"a number of {value.bit_length()} bits"
    return text if len(text) <= 60 else f"{text[:60]}..."
