"""Names and shapes of what Megatron would build for a config.json, from the configuration alone: no model is built.

Tests hold them against the parameters of the models that Megatron does build, for every family.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moerl.convert.sharded.parameters import fields_of, num_experts, sizes_of
from moerl.models.families.parts.config_fields import is_tied, num_mtp_layers
from moerl.models.families.parts.family import Family, Rule
from moerl.models.shards import DeltaSizes, Sizes, merge

Shape = tuple[int, ...]

_PREFIXES = ("decoder.layers.{layer}.", "mtp.layers.{mtp}.transformer_layer.", "mtp.layers.{mtp}.")
_OF_EXPERTS = ("mlp.router.", "mlp.experts.", "mlp.shared_experts.", "pre_mlp_layernorm.")
_OF_DENSE = ("mlp.linear_fc",)
_OF_DELTA_NETS = tuple(f"self_attention.{name}" for name in ("in_proj.", "conv1d.", "dt_bias", "A_log", "out_norm.", "out_proj."))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    shapes: Mapping[str, Shape]
    """Shape of every tensor that the model has, by its Hugging Face name, layers of multi-token prediction included."""
    copies: Mapping[str, Shape]
    """Shapes of tensors that a checkpoint may repeat there."""


def expected_tensors(family: Family, config: Mapping[str, Any]) -> ExpectedTensor:
    """Tensors of a config.json that breaks no rule of its family."""
    sizes, fields = sizes_of(family, config), fields_of(family, config)
    num_layers, num_mtp = sizes.num_layers, num_mtp_layers(config)
    shapes: dict[str, Shape] = {}
    copies: dict[str, Shape] = {}
    for rule, held in _built(family, config):
        merged = [tuple(part.shape) for part in merge(rule, [torch.empty(held, device="meta")], sizes=sizes)]
        for name, shape in zip(rule.hf, merged, strict=True):
            for numbers in _places(rule, fields, num_layers=num_layers, num_mtp=num_mtp, experts=num_experts(family, config)):
                shapes[name.format(**numbers)] = shape
        copies |= {copy.format(mtp=num_layers + index): merged[0] for copy in rule.copies for index in range(num_mtp)}
    return ExpectedTensor(shapes=shapes, copies=copies)


def parameter_shapes(family: Family, config: Mapping[str, Any]) -> dict[Rule, Shape]:
    """Shapes of Megatron's parameters on one rank, without padding of the vocabulary."""
    return dict(_built(family, config))


def _built(family: Family, config: Mapping[str, Any]) -> Iterator[tuple[Rule, Shape]]:
    """The rules whose parameters the model has."""
    known = _shapes(fields_of(family, config), sizes_of(family, config))
    for rule in family.rules:
        if (shape := known.get(_kind(rule))) is not None and not (rule.megatron == "output_layer.weight" and is_tied(config)):
            yield rule, shape


def _kind(rule: Rule) -> str:
    """A parameter's name without its layer."""
    return next((rule.megatron.removeprefix(prefix) for prefix in _PREFIXES if rule.megatron.startswith(prefix)), rule.megatron)


def _places(rule: Rule, fields: Mapping[str, Any], *, num_layers: int, num_mtp: int, experts: int) -> Iterator[dict[str, int]]:
    """Values that {layer}, {mtp} and {expert} of its Hugging Face names are; layers of multi-token prediction are built like the last
    layer."""
    if "{layer}" not in rule.megatron and not rule.is_mtp:
        yield {}
        return
    first, count = (num_layers, num_mtp) if rule.is_mtp else (0, num_layers)
    for layer in range(first, first + count):
        has_experts = _has_experts(fields, min(layer, num_layers - 1))
        if _kind(rule).startswith(_OF_DENSE if has_experts else _OF_EXPERTS):
            continue
        if _kind(rule).startswith("self_attention.") and _kind(rule).startswith(_OF_DELTA_NETS) != _is_delta_net(fields, layer):
            continue
        for expert in range(experts) if rule.is_expert else range(1):
            yield {"layer": layer, "mtp": layer, "expert": expert}


def _has_experts(fields: Mapping[str, Any], layer: int) -> bool:
    if "num_moe_experts" not in fields:
        return False
    layers = fields["moe_layer_freq"]
    return bool(layers[layer]) if isinstance(layers, list) else True


def _is_delta_net(fields: Mapping[str, Any], layer: int) -> bool:
    return "linear_attention_freq" in fields and fields["linear_attention_freq"][layer] == 1


def _shapes(fields: Mapping[str, Any], sizes: Sizes) -> dict[str, Shape]:
    """By the name without the layer; only what the configuration has."""
    hidden, ffn = fields["hidden_size"], fields["ffn_hidden_size"]
    attention = _latent_attention(fields) if fields.get("multi_latent_attention") else _grouped_attention(fields)
    if sizes.delta is not None:
        attention |= _delta_net(fields, sizes.delta)
    return {
        "embedding.word_embeddings.weight": (sizes.vocab_size, hidden),
        "output_layer.weight": (sizes.vocab_size, hidden),
        "decoder.final_layernorm.weight": (hidden,),
        **{f"{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "final_layernorm", "input_layernorm", "pre_mlp_layernorm")},
        "eh_proj.weight": (hidden, 2 * hidden),
        **{f"self_attention.{name}": shape for name, shape in attention.items()},
        "mlp.linear_fc1.layer_norm_weight": (hidden,),
        "mlp.linear_fc1.weight": (2 * ffn, hidden),
        "mlp.linear_fc2.weight": (hidden, ffn),
        **({f"mlp.{name}": shape for name, shape in _experts(fields).items()} if "num_moe_experts" in fields else {}),
    }


def _grouped_attention(fields: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, head_dim, heads = fields["hidden_size"], fields["kv_channels"], fields["num_attention_heads"]
    groups, over_heads = fields["num_query_groups"], fields.get("qk_norm_over_heads")
    gates = heads if fields.get("attention_output_gate") else 0
    rows, normed = (heads + gates + 2 * groups) * head_dim, {"q": heads, "k": groups} if over_heads else {"q": 1, "k": 1}
    return {
        "linear_qkv.layer_norm_weight": (hidden,),
        "linear_qkv.weight": (rows, hidden),
        **({"linear_qkv.bias": (rows,)} if fields["add_qkv_bias"] else {}),
        **({f"{which}_layernorm.weight": (number * head_dim,) for which, number in normed.items()} if fields["qk_layernorm"] else {}),
        **({"core_attention.softmax_offset": (heads,)} if fields.get("softmax_type") == "learnable" else {}),
        "linear_proj.weight": (hidden, heads * head_dim),
        **({"linear_proj.bias": (hidden,)} if fields["add_bias_linear"] else {}),
    }


def _latent_attention(fields: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, heads, queries, latent = (fields[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    plain, turned, values = (fields[name] for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
    rows = heads * (plain + turned)
    compressed = {"linear_q_down_proj.weight": (queries, hidden), "linear_q_up_proj.weight": (rows, queries)}
    if is_indexed := fields.get("experimental_attention_variant") == "dsa":
        norms = {"q_layernorm.weight": (queries,), "kv_layernorm.weight": (latent,)}
    else:
        norms = {"linear_kv_up_proj.layer_norm_weight": (latent,)}
        norms |= {} if queries is None else {"linear_q_up_proj.layer_norm_weight": (queries,)}
    return {
        **({"linear_q_proj.weight": (rows, hidden)} if queries is None else compressed),
        "linear_kv_down_proj.weight": (latent + turned, hidden),
        "linear_kv_up_proj.weight": (heads * (plain + values), latent),
        "linear_proj.weight": (hidden, heads * values),
        **norms,
        **(_indexer(fields) if is_indexed else {}),
    }


def _indexer(fields: Mapping[str, Any]) -> dict[str, Shape]:
    heads, channels = fields["dsa_indexer_n_heads"], fields["dsa_indexer_head_dim"]
    shapes = {
        "linear_wq_b.weight": (heads * channels, fields["q_lora_rank"]),
        "linear_wk.weight": (channels, fields["hidden_size"]),
        "k_norm.weight": (channels,),
        "k_norm.bias": (channels,),
        "linear_weights_proj.weight": (heads, fields["hidden_size"]),
    }
    return {f"core_attention.indexer.{name}": shape for name, shape in shapes.items()}


def _delta_net(fields: Mapping[str, Any], heads: DeltaSizes) -> dict[str, Shape]:
    hidden, queries, values = fields["hidden_size"], heads.keys * heads.key_dim, heads.values * heads.value_dim
    return {
        "in_proj.layer_norm_weight": (hidden,),
        "in_proj.weight": (2 * queries + 2 * values + 2 * heads.values, hidden),
        "conv1d.weight": (2 * queries + values, 1, fields["linear_conv_kernel_dim"]),
        "dt_bias": (heads.values,),
        "A_log": (heads.values,),
        "out_norm.weight": (heads.value_dim,),
        "out_proj.weight": (hidden, values),
    }


def _experts(fields: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, ffn, experts = fields["hidden_size"], fields["moe_ffn_hidden_size"], fields["num_moe_experts"]
    shapes: dict[str, Shape] = {
        "router.weight": (experts, hidden),
        "experts.linear_fc1.weight{expert}": (2 * ffn, hidden),
        "experts.linear_fc2.weight{expert}": (hidden, ffn),
    }
    if fields["add_bias_linear"]:
        shapes |= {"router.bias": (experts,), "experts.linear_fc1.bias{expert}": (2 * ffn,), "experts.linear_fc2.bias{expert}": (hidden,)}
    if fields.get("moe_router_enable_expert_bias"):
        shapes["router.expert_bias"] = (experts,)
    if (shared := fields.get("moe_shared_expert_intermediate_size")) is not None:
        shapes |= {"shared_experts.linear_fc1.weight": (2 * shared, hidden), "shared_experts.linear_fc2.weight": (hidden, shared)}
    if fields.get("moe_shared_expert_gate"):
        shapes["shared_experts.gate_weight"] = (1, hidden)
    return shapes
