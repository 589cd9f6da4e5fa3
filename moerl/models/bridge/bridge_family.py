"""A family declared by Megatron-Bridge, in moerl's words: what its provider says of Megatron's configuration, and its registry of names.

Only what moerl builds is taken. A field, a layer or a mapping it has no word for is refused by name: it would be left out silently.
"""

import dataclasses
import functools
import importlib
import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import transformers
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

import megatron_patches
from moerl.models.families.parts.family import Rule, Shard
from moerl.models.families.parts.rope import rope_parameters
from moerl.models.opened_families import Opened
from moerl.types.errors import CheckpointError

_FIELDS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "layernorm_epsilon",
    "init_method_std", "add_bias_linear", "add_qkv_bias", "normalization", "gated_linear_unit", "qk_layernorm",
    "num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
    "moe_router_topk", "moe_router_pre_softmax", "moe_router_score_function", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_dtype", "moe_grouped_gemm",
)  # fmt: skip
"""Fields of TransformerConfig that describe an architecture moerl builds."""
_LATENT = (
    "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_base",
    "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
"""Fields of MLATransformerConfig."""
_BESIDE = re.compile(
    r".*(_fusion|_fusion_impl|dropout|dtype|_overlap|_fused|_outputs|_softmax_in_fp32|_all2all)|bf16|fp16|persist_layer_norm|cp_comm_type"
    r"|init_method|output_layer_init_method|attention_backend|activation_func|moe_token_dispatcher_type|moe_router_load_balancing_type"
    r"|moe_aux_loss_coeff|moe_z_loss_coeff|async_tensor_model_parallel_allreduce|offload_modules|mtp_loss_scaling_factor|moe_router_bias_update_rate"
)
"""Fields that say how fast, in which dtype or with which loss a model is trained: a run's settings do. Of activations: see `_fields`."""
_ROUTERS = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_grouped_gemm": True}
_SHARDS: Mapping[str, Shard] = {
    "embedding.word_embeddings.weight": "vocab", "output_layer.weight": "vocab", "self_attention.linear_proj.weight": "row",
    "linear_fc2.weight": "row", "linear_q_proj.weight": "column", "linear_q_up_proj.weight": "column", "linear_kv_up_proj.weight": "column",
    "linear_q_down_proj.weight": "replicated", "linear_kv_down_proj.weight": "replicated", "layernorm.weight": "replicated",
    "layer_norm_weight": "replicated", "router.weight": "replicated", "shared_experts.gate_weight": "replicated",
}  # fmt: skip
"""Ends of the names of Megatron's parameters -> how their tensor is cut, as in the families of moerl/models/families."""
_PLAIN = ("AutoMapping", "ColumnParallelMapping", "RowParallelMapping", "ReplicatedMapping")
"""Mappings of one tensor to one parameter."""


def declared_family(hf: Mapping[str, Any]) -> Opened:
    """The family of a config.json, not proven; with rules also of parameters that this model does not have. Raises CheckpointError naming
    what moerl does not build."""
    config = _as_before_transformers_5(hf)
    bridge = model_bridge(hf["model_type"], config)
    provider = bridge.provider_bridge(SimpleNamespace(config=config))
    fields = _fields(provider) | _layers(provider)
    if "q_lora_rank" in fields:  # Megatron-Bridge takes null for a field that is not there, and Megatron's default for it
        fields["q_lora_rank"] = hf.get("q_lora_rank")
    return Opened(fields=fields, rotary=_rotary(provider), rules=tuple(_rules(bridge.mapping_registry().get_all_mappings())))


def model_bridge(model_type: str, config: SimpleNamespace) -> Any:
    """Megatron-Bridge's, of a model_type that transformers has; `config`: what it reads of config.json."""
    model = importlib.import_module("megatron.bridge.models.conversion.model_bridge")
    megatron_patches.activate()  # again: those of Megatron-Bridge are needed only now
    kind = type(transformers.AutoConfig.for_model(model_type))
    bridge = model.get_model_bridge(transformers.AutoModelForCausalLM._model_mapping[kind])
    bridge.hf_config = config
    return bridge


def _as_before_transformers_5(hf: Mapping[str, Any]) -> SimpleNamespace:
    """config.json with the defaults of its class, and rotary settings where providers look for them: transformers 5 moved those."""
    filled = transformers.AutoConfig.for_model(**hf).to_dict() | dict(hf)
    rope = rope_parameters(filled)
    is_scaled = rope["rope_type"] != "default"
    rotary = {"rope_theta": rope.get("rope_theta", 10000.0), "rope_scaling": rope if is_scaled else None}
    return SimpleNamespace(**{"torch_dtype": "float32"} | filled | rotary)


def _fields(provider: Any) -> dict[str, Any]:
    is_latent = isinstance(provider, MLATransformerConfig)
    described = {name: getattr(provider, name) for name in (*_FIELDS, *(_LATENT if is_latent else ()))}
    known = {*described, "position_embedding_type"}
    unknown = [name for name, value in _changed(provider, is_latent) if name not in known and not _BESIDE.fullmatch(name)]
    if unknown:
        listed = ", ".join(f"{name}={getattr(provider, name)!r}" for name in unknown)
        raise CheckpointError(f"Megatron-Bridge sets {listed}, which moerl does not build")
    if (
        getattr(provider.activation_func, "__name__", None) != "silu"
        or not provider.gated_linear_unit
        or provider.normalization != "RMSNorm"
    ):
        raise CheckpointError("its MLPs are not gated with SiLU, or its norms are not root-mean-square: moerl builds no others by this way")
    if is_latent:
        described["rope_type"] = "yarn" if provider.rotary_scaling_factor != 1.0 else "rope"
    return {name: value for name, value in described.items() if value is not None or name == "q_lora_rank"} | (
        _ROUTERS if provider.num_moe_experts else {}
    )


def _changed(provider: Any, is_latent: bool) -> Iterator[tuple[str, Any]]:
    """Fields of Megatron's configuration with another value than its default."""
    for field in dataclasses.fields(MLATransformerConfig if is_latent else TransformerConfig):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(provider, field.name)
        if value != default:
            yield field.name, value


def _layers(provider: Any) -> dict[str, Any]:
    """Fields for what its layers have beyond Megatron's own. Raises CheckpointError for others."""
    spec = provider.transformer_layer_spec
    function = spec.func if isinstance(spec, functools.partial) else spec
    if type(provider).provide is not importlib.import_module("megatron.bridge.models.gpt_provider").GPTModelProvider.provide:
        raise CheckpointError(f"{type(provider).__name__} builds its model by a function of its own")
    if function is get_gpt_decoder_block_spec or getattr(function, "__name__", "") == "default_layer_spec":
        return {}
    if getattr(function, "__name__", "") == "olmoe_layer_spec":  # norms of queries and keys over all heads (olmoe_provider.py)
        return {"qk_norm_over_heads": True}
    raise CheckpointError(f"its layers are of {getattr(function, '__name__', function)}, which moerl does not build")


def _rotary(provider: Any) -> dict[str, Any]:
    if provider.position_embedding_type != "rope":
        raise CheckpointError(
            f"its positions are of kind {provider.position_embedding_type}, which moerl builds for its own families alone"
        )
    arguments = {"position_embedding_type": "rope", "rotary_base": provider.rotary_base}
    if not isinstance(provider, MLATransformerConfig):
        arguments["rotary_percent"] = provider.rotary_percent
    if provider.rope_scaling and not isinstance(provider, MLATransformerConfig):
        arguments |= {"rope_scaling": True, "rope_scaling_factor": provider.rope_scaling_factor}
    return arguments


def _rules(mappings: list[Any]) -> Iterator[Rule]:
    for mapping in mappings:
        name, kind = _numbered(mapping.megatron_param), type(mapping).__name__
        if kind == "QKVMapping":
            yield Rule(megatron=name, hf=tuple(_numbered(mapping.hf_param[part]) for part in "qkv"), shard="qkv")
        elif kind == "GatedMLPMapping":
            yield Rule(megatron=name, hf=tuple(_numbered(mapping.hf_param[part]) for part in ("gate", "up")), shard="gate_up")
        elif kind in _PLAIN and _is_plain(mapping) and (shard := _shard(name)) is not None:
            yield Rule(megatron=name, hf=(_numbered(mapping.hf_param),), shard=shard)


def _is_plain(mapping: Any) -> bool:
    return getattr(mapping, "permute_dims", None) is None and isinstance(mapping.hf_param, str)


def _shard(name: str) -> Shard | None:
    """None: moerl builds no such parameter; a model that has it is refused, as no rule maps it."""
    stem = name.replace("{expert}", "")
    return next((shard for end, shard in _SHARDS.items() if stem.endswith(end)), None)


def _numbered(name: str) -> str:
    """Megatron-Bridge's stars as the numbers they stand for: the first of a layer, the second of an expert."""
    return name.replace("*", "{layer}", 1).replace("*", "{expert}", 1)
