"""What `train.megatron` may set: fields that leave the model as its config.json describes it, and the values they may have.

Every field of Megatron's TransformerConfig that moerl neither sets itself nor allows here is refused, with a reason: one that changes what
is computed would train another model than the servers sample from, without a word.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moerl.types.errors import Problem, problem

Accepts = Callable[[Any], bool]


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _one_of(*values: object) -> Accepts:
    return lambda value: isinstance(value, str | None) and value in values


_FLAG, _COUNT, _WEIGHT = (_is_flag, "true or false"), (_is_count, "an integer > 0"), (_is_weight, "a number >= 0")

ALLOWED: Mapping[str, tuple[Accepts, str]] = {
    # Losses and biases that balance experts: moerl/train/megatron/routers.py.
    "moe_router_load_balancing_type": (lambda _: True, ""),  # its own rule: router_problems
    "moe_aux_loss_coeff": _WEIGHT,
    "moe_z_loss_coeff": (lambda value: value is None or _is_weight(value), "a number >= 0, or null"),
    "moe_router_bias_update_rate": _WEIGHT,
    # The same numbers by other kernels, or in a wider type.
    "attention_backend": (_one_of("flash", "fused", "unfused", "auto"), "one of flash, fused, unfused, auto"),
    "moe_router_dtype": (_one_of("fp32", "fp64"), "fp32 or fp64"),
    **dict.fromkeys(
        (
            "attention_softmax_in_fp32", "fp32_residual_connection", "disable_bf16_reduced_precision_matmul", "bias_activation_fusion",
            "masked_softmax_fusion", "persist_layer_norm", "memory_efficient_layer_norm", "bias_dropout_fusion", "apply_rope_fusion",
            "use_te_activation_func", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap",
            "gradient_accumulation_fusion", "batch_invariant_mode", "disable_parameter_transpose_cache",
            "clone_scatter_output_in_embedding", "async_tensor_model_parallel_allreduce",
        ),
        _FLAG,
    ),
    # How ranks exchange the same numbers.
    "cp_comm_type": (_one_of("p2p", "all_gather", "a2a"), "one of p2p, all_gather, a2a"),
    "moe_token_dispatcher_type": (_one_of("alltoall", "flex"), "alltoall or flex"),
    "moe_flex_dispatcher_backend": (_one_of("deepep", "hybridep"), "deepep or hybridep"),
    "pipeline_model_parallel_comm_backend": (_one_of("nccl", "ucc", None), "nccl, ucc or null"),
    "tp_comm_bootstrap_backend": (_one_of("nccl", "mpi", "gloo"), "one of nccl, mpi, gloo"),
    **dict.fromkeys(("moe_deepep_num_sms", "moe_hybridep_num_sms"), _COUNT),
    **dict.fromkeys(
        (
            "moe_enable_deepep", "tp_comm_overlap", "tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag", "tp_comm_overlap_rs",
            "tp_comm_overlap_rs_dgrad", "tp_comm_split_ag", "tp_comm_atomic_ag", "tp_comm_split_rs", "tp_comm_atomic_rs",
            "tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1", "overlap_moe_expert_parallel_comm",
            "batch_p2p_sync", "use_ring_exchange_p2p", "deallocate_pipeline_outputs",
            "overlap_p2p_comm_warmup_flush",
        ),
        _FLAG,
    ),
    # When kernels are launched, where activations wait, what is measured.
    "cuda_graph_impl": (_one_of("none", "local", "transformer_engine"), "one of none, local, transformer_engine"),
    "cuda_graph_scope": (lambda value: isinstance(value, str | list), "text or a list"),
    "cuda_graph_warmup_steps": _COUNT,
    **dict.fromkeys(
        ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph"), _FLAG
    ),
    **dict.fromkeys(("use_te_rng_tracker", "barrier_with_L1_time"), _FLAG),
    # FP8's delayed scales: how far they look back.
    "fp8_margin": (lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0, "an integer >= 0"),
    "fp8_amax_history_len": _COUNT,
    "fp8_amax_compute_algo": (_one_of("most_recent", "max"), "most_recent or max"),
    "tp_only_amax_red": _FLAG,
}  # fmt: skip
"""Field -> what its value must satisfy, and that in words."""

_OF_MODEL = "config.json says what the model computes, and the servers compute that; this would train another one"
_DROPS = "tokens beyond an expert's capacity would skip it, and no server drops any"
_NOISE = "log-probs of two passes, and those of the servers, must agree: routers are not disturbed by random numbers"
_NOT_HERE = "it belongs to a kind of layer that no family of moerl has"
_INFERENCE = "it is for generating with Megatron; the servers of rollout.engine generate"
_MOVES = "parameters and states would move beside train.offload and checkpoints, which know nothing of it"
_BUILDS = "weights come from the checkpoint, and not from an initialization"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy", "moe_token_dropping"), _DROPS
    ),
    "moe_input_jitter_eps": _NOISE,
    "moe_router_force_load_balancing": f"it replaces what the routers compute by random numbers; {_NOISE}",
    "moe_router_topk_limited_devices": "the experts of a token would depend on the layout",
    "moe_apply_probs_on_input": "experts are not linear: scaled inputs give another output than scaled outputs",
    **dict.fromkeys(("moe_use_legacy_grouped_gemm", "moe_extended_tp"), "Megatron is removing it, and no test has seen it"),
    "moe_per_layer_logging": "moerl counts the load of every expert itself (train.router_replay, metrics)",
    **dict.fromkeys(
        (
            "softmax_scale", "softmax_type", "apply_residual_connection_post_layernorm", "layernorm_zero_centered_gamma",
            "glu_linear_offset",
            "activation_func_clamp_value", "rotary_interleaved", "window_size", "window_attn_skip_freq", "qk_l2_norm",
            "attention_output_gate",
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
            "experimental_attention_variant", "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_indexer_loss_coeff",
            "dsa_indexer_use_sparse_loss", "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim",
            "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "use_fused_weighted_squared_relu",
            "fused_single_qkv_rope",
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
    "overlap_moe_expert_parallel_comm": "it runs two micro-batches in one pass, and routes belong to one",
    **dict.fromkeys(
        ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl"),
        "a captured router would repeat the routes of the micro-batch it was captured with",
    ),
}
"""Of the allowed fields, those that do not go with train.router_replay."""

_OFF = (None, False, "none")


def allowed_problems(name: str, value: Any) -> Iterator[Problem]:
    """What is wrong with a field that Megatron has and moerl does not set itself."""
    path = f"train.megatron.{name}"
    if name not in ALLOWED:
        unknown = "the Megatron that moerl is tested with has no such field"
        yield problem(path, value, "cannot be set", REFUSED.get(name, unknown), "leave it out")
        return
    accepts, words = ALLOWED[name]
    if not accepts(value):
        reason = "Megatron takes any value, and what it makes of another one is another model, or an error after the start"
        yield problem(path, value, f"must be {words}", reason, "leave it out for moerl's choice")


def replay_problems_of(settings: Mapping[str, Any], mode: str) -> Iterator[Problem]:
    """What does not go with train.router_replay=`mode`."""
    for name, reason in WITHOUT_REPLAY.items():
        value = settings.get(name)
        if value not in _OFF:
            rule, fix = f"does not go with train.router_replay={mode}", "leave it out, or train.router_replay=off"
            yield problem(f"train.megatron.{name}", value, rule, reason, fix)
