"""Which names `train.megatron` may hold: of the fields of Megatron's TransformerConfig, less those moerl sets itself, the allowed ones.

The fields are read from the installed source text, because importing Megatron imports torch.
"""

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from moerl.config.derive.model_shape import ModelShape
from moerl.config.rules.facts import Facts
from moerl.config.rules.megatron_allowed import allowed_problems
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import Problem

_SOURCES = {
    "TransformerConfig": "transformer/transformer_config.py",
    "ModelParallelConfig": "model_parallel_config.py",
}

_LAYOUT = {
    "tensor_model_parallel_size": "set train.layout.tp instead",
    "pipeline_model_parallel_size": "set train.layout.pp instead",
    "virtual_pipeline_model_parallel_size": "set train.layout.vpp instead",
    "num_layers_in_first_pipeline_stage": "set train.layout.first_stage_layers instead",
    "num_layers_in_last_pipeline_stage": "set train.layout.last_stage_layers instead",
    "account_for_embedding_in_pipeline_split": "set train.layout.embedding_as_layer instead",
    "account_for_loss_in_pipeline_split": "set train.layout.loss_as_layer instead",
    "pipeline_model_parallel_layout": "set train.layout.first_stage_layers and last_stage_layers instead",
    "overlap_p2p_comm": "leave it out: it follows from train.layout.vpp; another value gives wrong gradients at pp=2",
    "batch_p2p_comm": "leave it out: it follows from train.layout.vpp; another value gives wrong gradients at pp=2",
    "microbatch_group_size_per_vp_stage": "leave it out: micro-batches are planned in groups of train.layout.pp",
    "context_parallel_size": "set train.layout.cp instead",
    "expert_model_parallel_size": "set train.layout.ep instead",
    "expert_tensor_parallel_size": "set train.layout.etp instead",
    "sequence_parallel": "leave it out: it is on whenever train.layout.tp > 1",
}
_MEMORY = {
    "recompute_granularity": "set train.recompute.kind instead",
    "recompute_method": "set train.recompute.method instead",
    "recompute_num_layers": "set train.recompute.num_layers instead",
    "recompute_modules": "set train.recompute.modules instead",
    "moe_layer_recompute": "set train.recompute.kind=selective with modules=[moe] instead",
    "distribute_saved_activations": "leave it out: sequence parallelism, on whenever train.layout.tp > 1, already cuts what is kept",
    "no_sync_func": "leave it out: it follows from train.overlap_grad_reduce",
    "grad_sync_func": "leave it out: it follows from train.overlap_grad_reduce",
    "param_sync_func": "leave it out: it follows from train.overlap_param_gather",
}
_DTYPE = dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype"), "set train.dtype instead")
_LINEAR_ONLY = "leave it out: FP8 is for linear layers only"
_PADS = "leave it out: experts pad their tokens with zeros; this would send them tokens they did not choose"
_NO_FP4 = "leave it out: moerl has no FP4 recipes; see train.fp8"
_FP8 = {
    "fp8": "set train.fp8 instead",
    "fp8_recipe": "set train.fp8.recipe instead",
    "fp8_quantizer_factory": "set train.fp8.recipe to one of the recipes moerl knows",
    "quant_recipe": "set train.fp8.recipe instead",
    "fp8_param": "leave it out: the weight push, the reference and checkpoints read plain parameters, and FP8 ones are already rounded",
    "fp8_wgrad": "leave it out: gradients of weights use FP8 like the other products",
    "fp8_interval": "leave it out: Transformer Engine ignores it",
    **dict.fromkeys(("fp8_dot_product_attention", "fp8_multi_head_attention", "activation_func_fp8_input_store"), _LINEAR_ONLY),
    "first_last_layers_bf16": "set train.fp8.first_layers_bf16 and last_layers_bf16 instead",
    "num_layers_at_start_in_bf16": "set train.fp8.first_layers_bf16 instead",
    "num_layers_at_end_in_bf16": "set train.fp8.last_layers_bf16 instead",
    **dict.fromkeys(("moe_router_padding_for_fp8", "moe_router_padding_for_quantization"), _PADS),
    **dict.fromkeys(("fp4", "fp4_recipe", "fp4_param", "fp4_quantizer_factory"), _NO_FP4),
}
_MODEL = dict.fromkeys(
    (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "normalization",
        "layernorm_epsilon",
        "gated_linear_unit",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "multi_latent_attention",
        "num_moe_experts",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_shared_expert_intermediate_size",
        "moe_router_topk",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_router_enable_expert_bias",
        "mtp_num_layers",
    ),
    "leave it out: it follows from the model's config.json (model.path, model.scratch)",
)
_RUN = {
    "deterministic_mode": "set deterministic instead",
    "hidden_dropout": "leave it out: log-probs of two passes must agree, so there is no dropout",
    "attention_dropout": "leave it out: log-probs of two passes must agree, so there is no dropout",
    "calculate_per_token_loss": "leave it out: algorithm.normalize_by says how the loss is scaled",
    "variable_seq_lengths": "leave it out: micro-batches are packed, so their lengths vary",
    "mtp_loss_scaling_factor": "set train.mtp_loss instead",
    "moe_enable_routing_replay": "set train.router_replay instead",
}
OWNED: Mapping[str, str] = {**_LAYOUT, **_MEMORY, **_DTYPE, **_FP8, **_MODEL, **_RUN}
"""Fields moerl sets itself, and what to do instead of naming them."""


@cache
def megatron_fields() -> Mapping[str, str]:
    """Field name -> annotation, of the installed Megatron; empty if it is not installed."""
    spec = importlib.util.find_spec("megatron")
    places = spec.submodule_search_locations if spec is not None else None
    roots = [Path(place) / "core" for place in places] if places is not None else []
    root = next((root for root in roots if root.is_dir()), None)
    if root is None:
        return {}
    return {name: annotation for cls, file in _SOURCES.items() for name, annotation in _fields(root / file, cls)}


def megatron_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Every rule train.megatron breaks, for the model if it is known."""
    yield from field_problems(config.train.megatron)
    yield from router_problems(config.train.megatron, facts.shape)


def field_problems(settings: Mapping[str, object]) -> Iterator[Problem]:
    """What is wrong with the names under `train.megatron`, and with values by themselves."""
    fields = megatron_fields()
    if settings and not fields:
        reason = "the names are checked against Megatron's own fields"
        yield _problem("", dict(settings), "needs megatron-core", reason, "install megatron-core, or leave train.megatron out")
        return
    for name, value in settings.items():
        if name in OWNED:
            yield _problem(name, value, "is set by moerl", "two settings of one thing could disagree", OWNED[name])
        elif name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            fix = f"did you mean train.megatron.{near[0]}?" if near else "leave it out"
            yield _problem(name, value, "is not a field of Megatron's TransformerConfig", "it would have no effect", fix)
        elif any(word in fields[name] for word in ("Callable", "dtype", "ContextManager")):
            yield _problem(name, value, "cannot be written in a file", f"Megatron wants {fields[name]}", "leave it out")
        else:
            yield from allowed_problems(name, value)


def router_problems(settings: Mapping[str, object], shape: ModelShape | None) -> Iterator[Problem]:
    """What is wrong with the load-balancing settings under `train.megatron`."""
    kind = settings.get("moe_router_load_balancing_type", "none")
    if kind not in ("none", "aux_loss"):
        reason = "the other kinds count tokens over ranks or sequences as if all were equally long, or route otherwise than the engine"
        yield _problem("moe_router_load_balancing_type", kind, "must be none or aux_loss", reason, "aux_loss, over each micro-batch")
    coefficient = settings.get("moe_aux_loss_coeff", 0.0)
    if coefficient != 0 and kind == "none":
        reason = "train.megatron.moe_router_load_balancing_type is none, so there is no loss to weigh"
        yield _problem("moe_aux_loss_coeff", coefficient, "has no effect", reason, "moe_router_load_balancing_type=aux_loss")
    rate = settings.get("moe_router_bias_update_rate", 0.0)
    if rate != 0 and shape is not None and not shape.has_expert_bias:
        yield _problem("moe_router_bias_update_rate", rate, "has no effect", "this model's routers have no bias", "leave it out")


def _fields(file: Path, cls: str) -> Iterator[tuple[str, str]]:
    tree = ast.parse(file.read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation)


def _problem(name: str, value: object, rule: str, reason: str, fix: str) -> Problem:
    path = f"train.megatron.{name}" if name else "train.megatron"
    return Problem(path=path, value=value, rule=rule, reason=reason, fix=fix)
