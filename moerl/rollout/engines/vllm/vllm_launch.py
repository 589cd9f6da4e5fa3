"""vLLM's arguments for one node of a server, from moerl's settings. Imports neither torch nor vLLM."""

from collections.abc import Mapping
from typing import Any

from moerl.rollout.engines.engine_arguments import Options, overrides

SUPPORTED = ">=0.32,<0.34"

NAMES = {
    "model.path": "model",
    "model.max_context": "max_model_len",
    "rollout.dtype": "dtype",
    "rollout.max_running": "max_num_seqs",
    "rollout.prefill_chunk": "max_num_batched_tokens",
    "rollout.layout.gpus": "tensor_parallel_size",
    "rollout.layout.gpus_per_node": "nnodes",
    "rollout.layout.port": "master_port",
    "rollout.layout.dp": "data_parallel_size",
    "rollout.layout.ep": "enable_expert_parallel",
    "rollout.layout.all_to_all": "all2all_backend",
    "rollout.layout.redundant_experts": "eplb_config",
    "rollout.layout.kv_cache": "kv_cache_dtype",
    "rollout.layout.weights": "quantization",
    "rollout.layout.memory_fraction": "gpu_memory_utilization",
    "rollout.layout.mtp_tokens": "speculative_config",
    "rollout.layout.cuda_graph_requests": "cudagraph_capture_sizes",
}
"""The argument each setting becomes. A user's engine_args may not name any of them."""

_ALL_TO_ALL = {"deepep_normal": "deepep_high_throughput", "deepep_low_latency": "deepep_low_latency"}


def arguments(options: Options, model: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with underscores, without those that are vLLM's defaults. `model`: its config.json. vLLM's sizes multiply: tensor
    parallel within a data-parallel group."""
    layout, requests = options.layout, -(-options.max_running // options.layout.dp)
    spans, has_eplb = layout.nodes > 1, layout.redundant_experts is not None
    load = {"load_format": "dummy" if options.pushes_mtp else "auto"}
    drafts = {"method": "mtp", "num_speculative_tokens": layout.mtp_tokens, "draft_load_config": load}
    values = {
        "model.path": options.model,
        "model.max_context": options.max_context,
        "rollout.dtype": options.dtype,
        "rollout.max_running": requests,
        "rollout.prefill_chunk": max(options.prefill_chunk, requests * (layout.mtp_tokens + 1)),
        "rollout.layout.gpus": layout.tp if layout.tp > 1 else None,
        "rollout.layout.dp": layout.dp if layout.dp > 1 else None,
        "rollout.layout.ep": True if layout.ep > 1 else None,
        "rollout.layout.all_to_all": _ALL_TO_ALL[layout.all_to_all] if layout.uses_deepep else None,
        "rollout.layout.redundant_experts": {"num_redundant_experts": layout.redundant_experts} if has_eplb else None,
        "rollout.layout.kv_cache": "fp8" if layout.kv_cache == "fp8" else None,
        "rollout.layout.weights": "fp8" if layout.weights == "fp8" else None,
        "rollout.layout.memory_fraction": layout.memory_fraction,
        "rollout.layout.cuda_graph_requests": _graph_sizes(layout.cuda_graph_requests or 0, layout.mtp_tokens + 1) or None,
        "rollout.layout.mtp_tokens": drafts if layout.mtp_tokens else None,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_eplb": has_eplb or None,
        "hf_overrides": overrides(model, layout) or None,
        "enable_sleep_mode": options.shares_gpus or None,
        "enforce_eager": True if layout.cuda_graph_requests == 0 else None,
        "rollout.layout.gpus_per_node": layout.nodes if spans else None,
        "node_rank": options.node_rank if spans else None,
        "master_addr": options.head if spans else None,
        "rollout.layout.port": layout.port if spans else None,
        # vLLM takes the data-parallel groups of a node from its rank.
        "data_parallel_rpc_port": layout.port + 1 if spans and layout.dp > 1 else None,
    }
    return {NAMES.get(name, name): value for name, value in values.items() if value is not None}


def _graph_sizes(requests: int, tokens: int) -> list[int]:
    """Batches of up to `requests`, in tokens, of which each request has so many: as many sizes as vLLM makes by itself. Told the largest
    alone, it leaves out what is no multiple of 8 or 16, and has none at all for one request with drafts (_set_cudagraph_sizes)."""
    counts = {*(1, 2, 4), *range(8, 256, 8), *range(256, requests, 16), requests}
    return [count * tokens for count in sorted(counts) if count <= requests] if requests else []
