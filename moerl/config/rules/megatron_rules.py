"""Rules of `train.megatron`: of the fields of Megatron's TransformerConfig, less those moerl sets itself, those that leave the model as
its config.json describes it, with the values they may have. The fields are read from the installed source: importing Megatron imports
torch.

Every field of Megatron's TransformerConfig that moerl neither sets itself nor allows here is refused, with a reason: one that changes what
is computed would train another model than the servers sample from, without a word.
"""

import ast
import difflib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from moerl.config.derive.model_shape import ModelShape
from moerl.config.rules.facts import Facts
from moerl.config.rules.parallel_rules import DEEPEP_RANKS, DEEPEP_REASON
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.train_config import TrainConfig
from moerl.types.errors import Problem, problem

Accepts = Callable[[Any], bool]


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _one_of(*values: object) -> Accepts:
    return lambda value: isinstance(value, str | None) and value in values


_FLAG: tuple[Accepts, str] = (lambda value: isinstance(value, bool), "true or false")
_COUNT: tuple[Accepts, str] = (lambda value: type(value) is int and value > 0, "an integer > 0")
_WEIGHT: tuple[Accepts, str] = (_is_weight, "a number >= 0")

ALLOWED: Mapping[str, tuple[Accepts, str]] = {
    # Losses and biases that balance experts: moerl/train/megatron/router_balance.py.
    "moe_router_load_balancing_type": (lambda _: True, ""),  # its own rule: router_problems
    "moe_aux_loss_coeff": _WEIGHT,
    "moe_z_loss_coeff": (lambda value: value is None or _is_weight(value), "a number >= 0, or null"),
    "moe_router_bias_update_rate": _WEIGHT,
    # The same numbers by other kernels, or in a wider type.
    "attention_backend": (_one_of("flash", "fused", "unfused", "auto"), "one of flash, fused, unfused, auto"),
    "dsa_kernel_backend": (_one_of("none", "tilelang", "cudnn"), "one of none, tilelang, cudnn"),
    "moe_router_dtype": (_one_of("fp32", "fp64"), "fp32 or fp64"),
    **dict.fromkeys(
        (
            "attention_softmax_in_fp32", "disable_bf16_reduced_precision_matmul", "bias_activation_fusion",
            "masked_softmax_fusion", "persist_layer_norm", "memory_efficient_layer_norm", "bias_dropout_fusion", "apply_rope_fusion",
            "use_te_activation_func", "moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap",
            "gradient_accumulation_fusion", "disable_parameter_transpose_cache", "clone_scatter_output_in_embedding",
            "async_tensor_model_parallel_allreduce",
        ),
        _FLAG,
    ),
    # How ranks exchange the same numbers.
    "cp_comm_type": (_one_of("p2p", "all_gather", "a2a"), "one of p2p, all_gather, a2a"),
    "moe_token_dispatcher_type": (_one_of("alltoall", "flex"), "alltoall or flex"),
    "moe_flex_dispatcher_backend": (_one_of("deepep", "hybridep"), "deepep or hybridep"),
    **dict.fromkeys(("moe_deepep_num_sms", "moe_hybridep_num_sms"), _COUNT),
    **dict.fromkeys(
        ("moe_enable_deepep", "batch_p2p_sync", "deallocate_pipeline_outputs", "overlap_p2p_comm_warmup_flush"),
        _FLAG,
    ),
    # What is measured.
    "barrier_with_L1_time": _FLAG,
    # FP8's delayed scales: how far they look back.
    "fp8_margin": (lambda value: type(value) is int and value >= 0, "an integer >= 0"),
    "fp8_amax_history_len": _COUNT,
    "fp8_amax_compute_algo": (_one_of("most_recent", "max"), "most_recent or max"),
    "tp_only_amax_red": _FLAG,
}  # fmt: skip
"""Field -> what its value must satisfy, and that in words. dsa_kernel_backend is of Megatron-Core 0.19, as is sparse attention."""

_OF_MODEL = "config.json says what the model computes, and the servers compute that; this would train another one"
_DROPS = "tokens beyond an expert's capacity would skip it, and no server drops any"
_NOISE = "log-probs of two passes, and those of the servers, must agree: routers are not disturbed by random numbers"
_NOT_HERE = "it belongs to a kind of layer that no family of moerl has"
_INFERENCE = "it is for generating with Megatron; the servers of rollout.engine generate"
_GRAPHS = (
    "a graph is of one length of micro-batches, and they differ here; it keeps addresses of weights, which train.offload moves; and "
    "Megatron's own training loop captures those of Transformer Engine"
)
_USER_BUFFERS = "Transformer Engine's buffers for it are made by Megatron's own training script, for micro-batches of one length"
_MOVES = "parameters and states would move beside train.offload and checkpoints, which know nothing of it"
_BUILDS = "weights come from the checkpoint, and not from an initialization"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy", "moe_token_dropping"), _DROPS
    ),
    "fp32_residual_connection": "layers would get float32, and Transformer Engine takes the dtype of its weights alone",
    "moe_grouped_gemm": "it is on: the bridge and checkpoints find experts by the names that grouped products give their weights",
    "moe_input_jitter_eps": _NOISE,
    "moe_router_force_load_balancing": f"it replaces what the routers compute by random numbers; {_NOISE}",
    "moe_router_topk_limited_devices": "the experts of a token would depend on the layout",
    "moe_apply_probs_on_input": "experts are not linear: scaled inputs give another output than scaled outputs",
    **dict.fromkeys(("moe_use_legacy_grouped_gemm", "moe_extended_tp"), "Megatron is removing it, and no test has seen it"),
    "moe_per_layer_logging": "moerl counts the load of every expert itself (train.router_replay, metrics)",
    **dict.fromkeys(
        (
            "softmax_scale", "softmax_type", "apply_residual_connection_post_layernorm", "glu_linear_offset",
            "activation_func_clamp_value", "rotary_interleaved", "window_size", "window_attn_skip_freq", "qk_l2_norm",
            "no_rope_freq", "apply_query_key_layer_scaling", "moe_shared_expert_gate", "moe_latent_size", "mrope_section",
        ),
        _OF_MODEL,
    ),
    **dict.fromkeys(("qk_clip", "qk_clip_alpha", "qk_clip_threshold", "log_max_attention_logit"), "moerl's optimizers clip no weights"),
    **dict.fromkeys(("init_method_std", "embedding_init_method_std", "init_model_with_meta_device"), _BUILDS),
    **dict.fromkeys(("perform_initialization", "use_cpu_initialization"), _BUILDS),
    **dict.fromkeys(
        ("cpu_offloading", "cpu_offloading_num_layers", "cpu_offloading_activations", "cpu_offloading_weights",
         "cpu_offloading_double_buffering", "fine_grained_activation_offloading", "offload_modules", "min_offloaded_tensor_size"),
        _MOVES,
    ),
    **dict.fromkeys(
        ("flash_decode", "inference_rng_tracker", "inference_sampling_seed", "use_inference_optimized_layers",
         "inference_fuse_tp_communication", "mlp_chunks_for_prefill", "symmetric_ar_type"),
        _INFERENCE,
    ),
    **dict.fromkeys(
        ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_warmup_steps", "enable_cuda_graph", "external_cuda_graph",
         "cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph", "use_te_rng_tracker"),
        _GRAPHS,
    ),
    **dict.fromkeys(
        ("tp_comm_overlap", "tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag", "tp_comm_overlap_rs",
         "tp_comm_overlap_rs_dgrad", "tp_comm_split_ag", "tp_comm_atomic_ag", "tp_comm_split_rs", "tp_comm_atomic_rs",
         "tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1", "tp_comm_bootstrap_backend"),
        _USER_BUFFERS,
    ),
    "overlap_moe_expert_parallel_comm": "it wants a plan of layers from the forward step, which Megatron's own model and loss make",
    "use_ring_exchange_p2p": "PyTorch has no ring_exchange; it is of a build of NVIDIA's own",
    "pipeline_model_parallel_comm_backend": "Megatron reads it where groups are made, which moerl makes with NCCL or gloo",
    "batch_invariant_mode": "it wants FlashAttention 3, which is in no environment, and kernels that Megatron's own script puts in place",
    "transformer_impl": "moerl builds its layers from Transformer Engine's specification, whatever this says",
    "hierarchical_context_parallel_sizes": "train.layout.cp is one size, and what is cut twice has not been held against it",
    **dict.fromkeys(("hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"), "moerl packs sequences itself (train.micro_batch_tokens)"),
    "num_microbatches_with_partial_activation_checkpoints": "train.recompute says what is computed again, of every micro-batch alike",
    **dict.fromkeys(
        ("cross_entropy_fusion_impl", "cross_entropy_loss_fusion"),
        "Megatron's own loss is not computed; the policy's is in moerl/train/loss/batch_loss.py",
    ),
    **dict.fromkeys(
        ("defer_embedding_wgrad_compute", "wgrad_deferral_limit", "delay_wgrad_compute", "ep_overlap_early_attn_memory_release"),
        "gradients would wait for a call that Megatron's own training loop makes",
    ),
    **dict.fromkeys(
        (
            "use_fused_weighted_squared_relu", "fused_single_qkv_rope",
            "is_hybrid_model", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "use_mamba_mem_eff_path",
            "heterogeneous_block_specs", "hetereogenous_dist_checkpoint",
        ),
        _NOT_HERE,
    ),
    "mtp_standalone": "layers of multi-token prediction are built on the last stage (train.mtp_loss)",
    **dict.fromkeys(("test_mode", "config_logger_dir"), "it is for tests of Megatron's own"),
    **dict.fromkeys(("use_kitchen", "use_kitchen_attention", "kitchen_attention_backend"), "of another package; see train.fp8"),
}  # fmt: skip
"""Field -> why it is not allowed. One of neither list is newer than the Megatron that moerl is tested with."""

WITHOUT_REPLAY: Mapping[str, str] = {
    "moe_router_fusion": "the fused router chooses experts itself and takes no routes",
    "moe_token_dispatcher_type": "DeepEP is given the experts of the largest probabilities: a route of probability 0 is lost",
}
"""Allowed fields that do not go with train.router_replay."""

_OFF = (None, False, "alltoall")


def allowed_problems(name: str, value: Any) -> Iterator[Problem]:
    """Fault of a field that Megatron has and moerl does not set itself."""
    if name not in ALLOWED:
        unknown = "the Megatron that moerl is tested with has no such field"
        yield _problem(name, value, "cannot be set", REFUSED.get(name, unknown), "leave it out")
        return
    accepts, words = ALLOWED[name]
    if not accepts(value):
        reason = "Megatron takes any value, and what it makes of another one is another model, or an error after the start"
        yield _problem(name, value, f"must be {words}", reason, "leave it out for moerl's choice")


def replay_problems_of(settings: Mapping[str, Any], mode: str) -> Iterator[Problem]:
    """Fields that do not go with train.router_replay=`mode`."""
    for name, reason in WITHOUT_REPLAY.items():
        value = settings.get(name)
        if value not in _OFF:
            rule, fix = f"does not go with train.router_replay={mode}", "leave it out, or train.router_replay=off"
            yield _problem(name, value, rule, reason, fix)


def transformer_engine_problems(train: TrainConfig) -> Iterator[Problem]:
    """Fault of a trainer whose ranks have GPUs. Whether it can be imported is for a rank to see: the import asks for a GPU."""
    if not train.reference_te and importlib.util.find_spec("transformer_engine") is None:
        reason = "ranks on GPUs would train on its PyTorch reference, which is many times slower, and nobody asked for that"
        fix = "make gpu installs Transformer Engine; train.reference_te=true trains on the reference"
        yield problem("train.reference_te", False, "needs Transformer Engine, which is not installed here", reason, fix)


_SOURCES = {"TransformerConfig": "transformer/transformer_config.py", "ModelParallelConfig": "model_parallel_config.py"}

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
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
        "normalization", "layernorm_epsilon", "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
        "multi_latent_attention", "num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq",
        "moe_shared_expert_intermediate_size", "moe_router_topk", "moe_router_pre_softmax",
        "moe_router_score_function", "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias", "mtp_num_layers",
    ),
    "leave it out: it follows from the model's config.json (model.path, model.scratch)",
)  # fmt: skip
_VARIANTS = {
    **dict.fromkeys(("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"), "leave it out: indexers are not trained"),
    **dict.fromkeys(
        (
            "experimental_attention_variant", "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_indexer_topk_freq",
            "dsa_indexer_skip_topk_offset", "dsa_indexer_rope_interleaved", "dsa_indexer_rotate_activation", "dsa_indexer_scoring_relu",
            "dsa_indexer_k_norm_epsilon", "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
            "linear_num_key_heads", "linear_num_value_heads", "attention_output_gate", "layernorm_zero_centered_gamma",
        ),
        "leave it out: it follows from the model's config.json (model.path)",
    ),
}  # fmt: skip
_RUN = {
    "deterministic_mode": "set deterministic instead",
    "hidden_dropout": "leave it out: log-probs of two passes must agree, so there is no dropout",
    "attention_dropout": "leave it out: log-probs of two passes must agree, so there is no dropout",
    "calculate_per_token_loss": "leave it out: algorithm.normalize_by says how the loss is scaled",
    "variable_seq_lengths": "leave it out: micro-batches are packed, so their lengths vary",
    "mtp_loss_scaling_factor": "set train.mtp_loss instead",
    "moe_enable_routing_replay": "set train.router_replay instead",
}
OWNED: Mapping[str, str] = {**_LAYOUT, **_MEMORY, **_DTYPE, **_FP8, **_MODEL, **_VARIANTS, **_RUN}
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
    kernels = config.train.megatron.get("dsa_kernel_backend", "none")
    if kernels != "none" and facts.shape is not None and not facts.shape.has_index:
        yield _problem("dsa_kernel_backend", kernels, "has no effect", "this model's attention is not sparse", "leave it out")
    yield from dispatcher_problems(config.train)
    flushes = "overlap_p2p_comm_warmup_flush"
    if config.train.megatron.get(flushes) and config.train.layout.vpp == 1:
        reason = "Megatron overlaps what chunks send to each other, and a stage has one chunk"
        yield _problem(flushes, True, "needs train.layout.vpp > 1", reason, "leave it out")


def field_problems(settings: Mapping[str, object]) -> Iterator[Problem]:
    """Faults of the names under `train.megatron`, and with values by themselves."""
    fields = megatron_fields()
    if settings and not fields:
        reason = "the names are checked against Megatron's own fields"
        yield problem("train.megatron", dict(settings), "needs megatron-core", reason, "install megatron-core, or leave train.megatron out")
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
    """Faults of the load-balancing settings under `train.megatron`."""
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


def dispatcher_problems(train: TrainConfig) -> Iterator[Problem]:
    """Faults of the dispatcher that sends tokens by DeepEP (csrc/deep_ep.cpp, csrc/kernels/launch.cuh, configs.cuh)."""
    name, fix = "moe_token_dispatcher_type", "leave it out: alltoall"
    if train.megatron.get(name) != "flex":
        if train.megatron.get("moe_enable_deepep"):
            reason = "DeepEP is a backend of that dispatcher"
            yield _problem("moe_enable_deepep", True, f"needs train.megatron.{name}=flex", reason, "leave it out: alltoall")
        return
    if train.dtype != "bfloat16":
        yield _problem(name, "flex", f"does not go with train.dtype={train.dtype}", "DeepEP sends tokens in bfloat16", fix)
    num_ranks = train.layout.ep * train.layout.etp
    if num_ranks not in DEEPEP_RANKS:
        rule = f"does not go with {num_ranks} ranks that exchange tokens (train.layout.ep x etp)"
        yield _problem(name, "flex", rule, DEEPEP_REASON, fix)
    if train.megatron.get("moe_shared_expert_overlap"):
        reason = "Megatron's flex dispatcher does not run the shared experts"
        yield _problem("moe_shared_expert_overlap", True, "does not go with moe_token_dispatcher_type=flex", reason, "one of the two")


def _fields(file: Path, cls: str) -> Iterator[tuple[str, str]]:
    tree = ast.parse(file.read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation)


def _problem(name: str, value: object, rule: str, reason: str, fix: str) -> Problem:
    return problem(f"train.megatron.{name}", value, rule, reason, fix)
