"""Parts that families are composed of: rules of layers that many share, and the Megatron fields that go with them.

`megatron` and `hf` are names of a module in either, by default of a decoder layer. Megatron's Transformer
Engine layers hold the norm before attention, and that before a dense MLP, in the projection after it.
"""

from collections.abc import Mapping
from typing import Any

from moerl.models.families.parts.family import Rule, Served, Shard

LAYER, HF_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"
MTP, HF_MTP = "mtp.layers.{mtp}", "model.layers.{mtp}"
_USUAL = Served()


def ends(*, repeated_by_mtp: bool = False) -> tuple[Rule, ...]:
    """Embedding, last norm and output layer. `repeated_by_mtp`: published checkpoints have copies in the layers after the last."""
    embedding, output = (f"{HF_MTP}.embed_tokens.weight",), (f"{HF_MTP}.shared_head.head.weight",)
    return (
        Rule(
            megatron="embedding.word_embeddings.weight",
            hf=("model.embed_tokens.weight",),
            shard="vocab",
            copies=embedding if repeated_by_mtp else (),
        ),
        Rule(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
        Rule(megatron="output_layer.weight", hf=("lm_head.weight",), shard="vocab", copies=output if repeated_by_mtp else ()),
    )


def attention(
    megatron: str = LAYER, hf: str = HF_LAYER, *, has_bias: bool = False, has_qk_norm: bool = False, shard: Shard = "qkv"
) -> tuple[Rule, ...]:
    """Grouped-query attention of a layer, with the norm before it. `has_bias`: of queries, keys and values, not of the output. `shard`:
    gated_qkv where queries come with a gate for each channel of a head's output."""
    ours, theirs = f"{megatron}.self_attention", f"{hf}.self_attn"
    kinds = ("weight", "bias") if has_bias else ("weight",)
    norms = ("q", "k") if has_qk_norm else ()
    return (
        Rule(megatron=f"{ours}.linear_qkv.layer_norm_weight", hf=(f"{hf}.input_layernorm.weight",)),
        *(
            Rule(megatron=f"{ours}.linear_qkv.{kind}", hf=tuple(f"{theirs}.{name}_proj.{kind}" for name in "qkv"), shard=shard)
            for kind in kinds
        ),
        *(Rule(megatron=f"{ours}.{name}_layernorm.weight", hf=(f"{theirs}.{name}_norm.weight",)) for name in norms),
        Rule(megatron=f"{ours}.linear_proj.weight", hf=(f"{theirs}.o_proj.weight",), shard="row"),
    )


def gated_mlp(megatron: str, hf: str) -> tuple[Rule, ...]:
    """A dense MLP or shared experts."""
    return (
        Rule(megatron=f"{megatron}.linear_fc1.weight", hf=(f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), shard="gate_up"),
        Rule(megatron=f"{megatron}.linear_fc2.weight", hf=(f"{hf}.down_proj.weight",), shard="row"),
    )


def dense(megatron: str = LAYER, hf: str = HF_LAYER) -> tuple[Rule, ...]:
    """The dense MLP of a layer, with the norm before it."""
    norm = Rule(megatron=f"{megatron}.mlp.linear_fc1.layer_norm_weight", hf=(f"{hf}.post_attention_layernorm.weight",))
    return (norm, *gated_mlp(f"{megatron}.mlp", f"{hf}.mlp"))


def experts(megatron: str = LAYER, hf: str = HF_LAYER, *, served: Served = _USUAL) -> tuple[Rule, ...]:
    """The router and the routed experts of a layer, with the norm before them. `served`: how checkpoints call them."""
    block, (gate, up, down) = served.block, served.projections
    expert = f"{hf}.{block}.experts.{{expert}}"
    return (
        Rule(megatron=f"{megatron}.pre_mlp_layernorm.weight", hf=(f"{hf}.post_attention_layernorm.weight",)),
        Rule(megatron=f"{megatron}.mlp.router.weight", hf=(f"{hf}.{block}.gate.weight",)),
        Rule(
            megatron=f"{megatron}.mlp.experts.linear_fc1.weight{{expert}}",
            hf=(f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
            shard="gate_up",
        ),
        Rule(megatron=f"{megatron}.mlp.experts.linear_fc2.weight{{expert}}", hf=(f"{expert}.{down}.weight",), shard="row"),
    )


def gated_shared_expert(megatron: str = LAYER, hf: str = HF_LAYER) -> tuple[Rule, ...]:
    """An expert of every token, whose output a gate scales."""
    return (
        *gated_mlp(f"{megatron}.mlp.shared_experts", f"{hf}.mlp.shared_expert"),
        Rule(megatron=f"{megatron}.mlp.shared_experts.gate_weight", hf=(f"{hf}.mlp.shared_expert_gate.weight",)),
    )


# -- Megatron's fields -------------------------------------------------------------------------------------------


def decoder_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron fields of every family here: root-mean-square norms, gated MLPs, no biases but those a family adds."""
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        "init_method_std": hf.get("initializer_range", 0.02),
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
    }


def attention_fields(hf: Mapping[str, Any], *, has_bias: bool = False, has_qk_norm: bool = False) -> dict[str, Any]:
    """Megatron fields of grouped-query attention. Without head_dim the heads share hidden_size; without num_key_value_heads each has its
    own."""
    heads, groups, head_dim = (hf.get(name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    return {
        "num_query_groups": heads if groups is None else groups,
        "kv_channels": hf["hidden_size"] // hf["num_attention_heads"] if head_dim is None else head_dim,
        "qk_layernorm": has_qk_norm,
        "add_qkv_bias": has_bias,
    }


PLAIN_ROUTER = {
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}


def softmax_router_fields(
    hf: Mapping[str, Any], *, normalised: bool, experts: str = "num_experts", ffn_size: str = "moe_intermediate_size"
) -> dict[str, Any]:
    """Experts in every layer. Softmax over the chosen experts equals softmax over all, normalised. `experts`, `ffn_size`: names of their
    number and width in config.json."""
    return {
        "num_moe_experts": hf[experts],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf[ffn_size],
        "moe_router_pre_softmax": not normalised,
        "moe_layer_freq": 1,
        **PLAIN_ROUTER,
    }
