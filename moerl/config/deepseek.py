"""What a config.json of model_type deepseek_v3 must say so that Megatron computes the same: its rotary embedding and every rule.

Names as published (config.json of DeepSeek-V3) and as transformers 5 writes them. Imports neither torch nor Megatron.
"""

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

Rule = tuple[str, str, str]
"""(rule, reason, what to write instead)"""


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_type, rope_theta and the settings of yarn; transformers 5 moved them into rope_parameters and renamed "type"."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    named = {"rope_type": given.get("type", "default"), **given}
    return {"rope_theta": config["rope_theta"], **named} if "rope_theta" in config else named


def broken_rules(config: Mapping[str, Any]) -> Iterator[Rule]:
    """Every rule the model breaks."""
    yield from _fixed_values(config)
    yield from _routing(config)
    yield from _rope(config)
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        reason = "every head has keys and values of its own, made from the shared latent"
        yield f"needs num_key_value_heads={config['num_attention_heads']}, as many as heads", reason, "correct config.json"
    if config.get("head_dim") not in (None, config["qk_rope_head_dim"]):
        reason = "transformers turns head_dim channels, and the others are not rotary"
        yield f"needs head_dim={config['qk_rope_head_dim']}, qk_rope_head_dim, or none", reason, "correct config.json"
    if config["first_k_dense_replace"] >= config["num_hidden_layers"]:
        reason = "the last layer must have experts: the layers of multi-token prediction are built like it"
        yield f"needs first_k_dense_replace below num_hidden_layers={config['num_hidden_layers']}", reason, "a model with experts"
    if config["q_lora_rank"] is None and _norms_plain_queries():
        reason = "without compressed queries this version of Megatron norms their input a second time"
        yield "needs q_lora_rank with megatron-core 0.19", reason, "megatron-core 0.16.1"
    if config.get("quantization_config") is not None:
        reason = "its weights are stored quantized with scales beside them, and moerl loads plain weights"
        yield "must not be quantized (quantization_config)", reason, "moerl convert SRC DST --dtype bfloat16, and DST as model.path"


def _norms_plain_queries() -> bool:
    try:
        return Version(version("megatron-core")) >= Version("0.19")
    except PackageNotFoundError:
        return False


_FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "rms_norm_eps": ((1e-6,), "transformers norms the compressed queries, keys and values with 1e-6, Megatron with rms_norm_eps"),
    "norm_topk_prob": ((True,), "Megatron normalises the weights of the chosen experts whenever scores are sigmoids"),
    "attention_bias": ((False, None), "Megatron's latent attention has no biases"),
    "rope_interleave": ((True, None), "Megatron's latent attention turns neighbouring channels"),
    "tie_word_embeddings": ((False, None), "Megatron cannot save an output layer tied to an embedding that multi-token prediction shares"),
    "hidden_act": (("silu", None), "the experts are gated with SiLU"),
    "scoring_func": (("sigmoid", None), "the router's scores are sigmoids"),
    "topk_method": (("noaux_tc", None), "experts are chosen with the correction bias"),
    "moe_layer_freq": ((1, None), "every layer from first_k_dense_replace on has experts"),
}


def _fixed_values(config: Mapping[str, Any]) -> Iterator[Rule]:
    for name, (allowed, reason) in _FIXED.items():
        value = config.get(name)
        if value not in allowed:
            yield f"needs {name}={allowed[0]!r} in config.json, not {value!r}", reason, "another model of this type"


def _routing(config: Mapping[str, Any]) -> Iterator[Rule]:
    chosen, groups, kept = (config[name] for name in ("num_experts_per_tok", "n_group", "topk_group"))
    if chosen < 2:
        reason = "with one expert Megatron does not normalise its weight, transformers does"
        yield f"needs num_experts_per_tok of at least 2, not {chosen}", reason, "another model of this type"
    if config["n_routed_experts"] % groups:
        yield f"needs n_group={groups} to divide n_routed_experts={config['n_routed_experts']}", "groups are equal", "another model"
    if kept != groups and chosen // kept != 2:
        reason = "transformers scores a group by its 2 best experts, Megatron by its num_experts_per_tok // topk_group best"
        fix = "a model where these agree, or where topk_group equals n_group"
        yield f"needs num_experts_per_tok // topk_group = 2, not {chosen} // {kept}", reason, fix


def _rope(config: Mapping[str, Any]) -> Iterator[Rule]:
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    if kind not in ("default", "yarn"):
        reason = "Megatron's latent attention has these two"
        yield f"needs rope_type default or yarn in rope_scaling, not {kind!r}", reason, "another model of this type"
    if kind != "yarn":
        return
    if rope.get("attention_factor") is not None or rope.get("truncate") is False:
        reason = "Megatron derives the attention factor from mscale and always rounds the range of corrected frequencies"
        yield "must leave attention_factor and truncate of rope_scaling at their defaults", reason, "another model of this type"
    if rope.get("mscale_all_dim") and not rope.get("mscale"):
        reason = "without mscale transformers ignores mscale_all_dim in one of two places"
        yield "needs mscale beside mscale_all_dim in rope_scaling", reason, "mscale=1.0 if the model was trained so"
