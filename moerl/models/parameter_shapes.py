"""Shapes of the parameters that Megatron builds for a configuration, whole and by the rules of its family: no model is built.

Tests hold them against the parameters of the models that Megatron does build, for every family. Imports no torch.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from moerl.models.families.parts.family import Family, Rule

Shape = tuple[int, ...]

_PREFIXES = ("decoder.layers.{layer}.", "mtp.layers.{mtp}.transformer_layer.", "mtp.layers.{mtp}.")
_OF_EXPERTS = ("mlp.router.", "mlp.experts.", "mlp.shared_experts.", "pre_mlp_layernorm.")
_OF_DENSE = ("mlp.linear_fc",)
_OF_DELTA_NETS = tuple(f"self_attention.{name}" for name in ("in_proj.", "conv1d.", "dt_bias", "A_log", "out_norm.", "out_proj."))


def parameter_shapes(family: Family, fields: Mapping[str, Any], *, vocab_size: int, tied: bool) -> dict[Rule, Shape]:
    """Shapes by the rules whose parameters the model has, without padding of the vocabulary. `fields`: of Megatron's configuration. `tied`:
    the output layer is the embedding."""
    known = _shapes(fields, vocab_size)
    rules = (rule for rule in family.rules if not (tied and rule.megatron == "output_layer.weight"))
    return {rule: known[_kind(rule)] for rule in rules if _kind(rule) in known}


class LayerKind(NamedTuple):
    """Layers of a kind have the same parameters."""

    has_experts: bool
    is_delta_net: bool
    is_mtp: bool

    def has(self, rule: Rule) -> bool:
        """Whether such a layer has the parameter."""
        name = _kind(rule)
        if name == rule.megatron or rule.is_mtp != self.is_mtp or name.startswith(_OF_DENSE if self.has_experts else _OF_EXPERTS):
            return False
        return not name.startswith("self_attention.") or name.startswith(_OF_DELTA_NETS) == self.is_delta_net


def layer_kind(fields: Mapping[str, Any], layer: int) -> LayerKind:
    """Layers of multi-token prediction follow the last one, and are built like it."""
    like = min(layer, fields["num_layers"] - 1)
    return LayerKind(has_experts(fields, like), is_delta_net(fields, like), layer >= fields["num_layers"])


def places(rule: Rule, fields: Mapping[str, Any], num_mtp: int) -> Iterator[dict[str, int]]:
    """Values of {layer}, {mtp} and {expert} under which a model with so many layers of multi-token prediction has the parameter."""
    if "{layer}" not in rule.megatron and not rule.is_mtp:
        yield {}
        return
    num_layers = fields["num_layers"]
    for layer in range(num_layers + num_mtp):
        if layer_kind(fields, layer).has(rule):
            numbers = {"mtp": layer - num_layers} if rule.is_mtp else {"layer": layer}
            yield from ({**numbers, "expert": expert} for expert in range(fields["num_moe_experts"])) if rule.is_expert else (numbers,)


def has_experts(fields: Mapping[str, Any], layer: int) -> bool:
    frequency = fields.get("moe_layer_freq", 1)
    return fields.get("num_moe_experts") is not None and (not isinstance(frequency, list) or frequency[layer] == 1)


def is_delta_net(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether it has a gated delta net in the place of attention."""
    return "linear_attention_freq" in fields and fields["linear_attention_freq"][layer] == 1


def _kind(rule: Rule) -> str:
    """A parameter's name without its layer."""
    return next((rule.megatron.removeprefix(prefix) for prefix in _PREFIXES if rule.megatron.startswith(prefix)), rule.megatron)


def _shapes(fields: Mapping[str, Any], vocab_size: int) -> dict[str, Shape]:
    """By the name without the layer; only what the configuration has."""
    hidden, ffn = fields["hidden_size"], fields["ffn_hidden_size"]
    attention = _latent_attention(fields) if fields.get("multi_latent_attention") else _grouped_attention(fields)
    if "linear_attention_freq" in fields:
        attention |= _delta_net(fields)
    return {
        "embedding.word_embeddings.weight": (vocab_size, hidden),
        "output_layer.weight": (vocab_size, hidden),
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


def _delta_net(fields: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, heads, width = (fields[name] for name in ("hidden_size", "linear_num_value_heads", "linear_value_head_dim"))
    queries, values = fields["linear_num_key_heads"] * fields["linear_key_head_dim"], heads * width
    return {
        "in_proj.layer_norm_weight": (hidden,),
        "in_proj.weight": (2 * queries + 2 * values + 2 * heads, hidden),
        "conv1d.weight": (2 * queries + values, 1, fields["linear_conv_kernel_dim"]),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "out_norm.weight": (width,),
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
