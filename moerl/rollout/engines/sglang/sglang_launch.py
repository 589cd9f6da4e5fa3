"""SGLang's arguments and environment for one node of a server, from moerl's settings. Imports neither torch nor SGLang."""

from collections.abc import Mapping
from typing import Any

from moerl.rollout.engines.engine_arguments import Options, overrides

SUPPORTED = ">=0.5.23,<0.6"

NAMES = {
    "model.path": "model_path",
    "model.max_context": "context_length",
    "rollout.dtype": "dtype",
    "rollout.max_running": "max_running_requests",
    "rollout.prefill_chunk": "chunked_prefill_size",
    "train.router_replay": "enable_return_routed_experts",
    "rollout.layout.gpus": "tp_size",
    "rollout.layout.gpus_per_node": "nnodes",
    "rollout.layout.port": "dist_init_addr",
    "rollout.layout.dp": "attn_dp_size",
    "rollout.layout.ep": "ep_size",
    "rollout.layout.all_to_all": "moe_a2a_backend",
    "rollout.layout.redundant_experts": "ep_num_redundant_experts",
    "rollout.layout.kv_cache": "kv_cache_dtype",
    "rollout.layout.weights": "quantization",
    "rollout.layout.memory_fraction": "mem_fraction_static",
    "rollout.layout.mtp_tokens": "speculative_num_steps",
    "rollout.layout.cuda_graph_requests": "cuda_graph_max_bs_decode",
}
"""The argument each setting becomes. A user's engine_args may not name any of them."""

_SPARE_POSITIONS = 8
"""SGLang ends a request some tokens before its context_length."""

NCCL_MEMORY = ("NCCL_CUMEM_ENABLE", "-2")
"""Variable, and its value for NCCL's own choice, which the trainer's ranks have. Where it is not set SGLang sets it to 0
(entrypoints/engine.py), and NCCL maps a buffer of another GPU of the node in the way of the process that maps it, not of the one that made
it (src/transport/p2p.cc): a push by NCCL would fail between a rank and a server of one node."""

_DEEPEP_MODES = {"deepep": "auto", "deepep_normal": "normal", "deepep_low_latency": "low_latency"}
_DISPATCH_TOKENS = 128
"""SGLang's own number for DeepEP's kernels for latency (environ.py)."""


def arguments(options: Options, model: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with underscores, without those that are SGLang's defaults. `model`: its config.json."""
    layout = options.layout
    values = {
        "model.path": options.model,
        "model.max_context": positions_of_request(options),
        "rollout.dtype": options.dtype,
        "rollout.max_running": options.max_running,
        "rollout.prefill_chunk": options.prefill_chunk * layout.dp,
        "train.router_replay": options.returns_routes,
        "rollout.layout.gpus": layout.gpus if layout.gpus > 1 else None,
        "rollout.layout.dp": layout.dp if layout.dp > 1 else None,
        "rollout.layout.ep": layout.ep if layout.ep > 1 else None,
        "rollout.layout.all_to_all": "deepep" if layout.uses_deepep else None,
        "rollout.layout.redundant_experts": layout.redundant_experts,
        "rollout.layout.kv_cache": "fp8_e4m3" if layout.kv_cache == "fp8" else None,
        "rollout.layout.weights": "fp8" if layout.weights == "fp8" else None,
        "rollout.layout.memory_fraction": layout.memory_fraction,
        "rollout.layout.mtp_tokens": layout.mtp_tokens or None,
        "rollout.layout.cuda_graph_requests": layout.cuda_graph_requests or None,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "sampling_backend": "pytorch",
        "enable_eplb": None if layout.redundant_experts is None else True,
        "json_model_override_args": overrides(model, layout) or None,
        **_modes(options),
    }
    return {NAMES.get(name, name): value for name, value in values.items() if value is not None}


def positions_of_request(options: Options) -> int:
    """Positions that SGLang needs for a request of max_context tokens: it reserves the tokens of two passes that check drafts
    (mem_cache/allocation_sizing.py), and refuses or ends a request that leaves no room for them."""
    return options.max_context + max(_SPARE_POSITIONS, 2 * (options.layout.mtp_tokens + 1))


def environment(options: Options) -> dict[str, str]:
    """Environment of the server process, before SGLang is imported."""
    layout, own = options.layout, {}
    if layout.gpus > 1:
        # Of no use but while it starts, and it would leave 25 MB in /dev/shm.
        own["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"
    if layout.all_to_all in ("deepep", "deepep_low_latency"):
        tokens = -(-options.max_running // layout.dp) * (layout.mtp_tokens + 1)
        if layout.all_to_all == "deepep_low_latency":
            tokens = max(tokens, options.prefill_chunk)  # prompts go through the same kernels (DeepEPMode.resolve)
        own["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = str(max(_DISPATCH_TOKENS, tokens))
    return own


def _modes(options: Options) -> dict[str, Any]:
    """Arguments that go with a setting and have none of their own."""
    own: dict[str, Any] = {}
    layout = options.layout
    if layout.dp > 1:
        # Neither the dense layers nor the output layer are then cut over GPUs that have other tokens.
        own |= {"moe_dense_tp_size": 1, "enable_dp_lm_head": True}
    if layout.uses_deepep:
        own["deepep_mode"] = _DEEPEP_MODES[layout.all_to_all]
        if layout.weights == "dtype":
            # Without it experts in bfloat16 get a runner that takes no tokens from DeepEP (layers/moe/ep_moe/layer.py).
            own["moe_runner_backend"] = "deep_gemm"
    if layout.mtp_tokens:
        # A chain, not a tree, of drafts.
        own |= {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 1, "speculative_num_draft_tokens": layout.mtp_tokens + 1}
        own["speculative_draft_load_format"] = "dummy" if options.pushes_mtp else "auto"
    if options.shares_gpus:
        own["enable_memory_saver"] = True
        if layout.mtp_tokens and not options.pushes_mtp:
            own["enable_draft_weights_cpu_backup"] = True  # all else comes by the push before it serves again
    if layout.cuda_graph_requests == 0:
        own |= {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
    if layout.nodes > 1:
        own["rollout.layout.gpus_per_node"], own["node_rank"] = layout.nodes, options.node_rank
        own["rollout.layout.port"] = f"{options.head}:{layout.port}"
    return own
