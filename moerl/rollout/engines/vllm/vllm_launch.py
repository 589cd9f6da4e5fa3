"""vLLM's arguments for one node of a server, from moerl's settings. Imports neither torch nor vLLM."""

from typing import Any

from moerl.config.schema.rollout_config import ServerLayout
from moerl.rollout.engines.engine_arguments import FP8_BLOCKS, Names, Options, names_of

SUPPORTED = ">=0.32,<0.34"
TESTED = "0.32.0"
"""Version that `moerl check` renders for, where no environment says which version it has."""

NAMES: dict[str, Names] = {
    SUPPORTED: {
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
}
"""Names by range of versions: the argument each setting becomes. A user's engine_args may not name any of them."""

OVERRIDES = "hf_overrides"
"""The argument that changes fields of config.json."""

_ALL_TO_ALL = {"deepep_normal": "deepep_high_throughput", "deepep_low_latency": "deepep_low_latency"}


def arguments(options: Options, version: str) -> dict[str, Any]:
    """Arguments by name, with underscores. EngineError for a version that is not in NAMES."""
    names, layout = names_of("vllm", NAMES, version), options.layout
    requests = -(-options.max_running // layout.dp)
    sizes = {
        "model.path": options.model,
        "model.max_context": options.max_context,
        "rollout.dtype": options.dtype,
        "rollout.max_running": requests,
        "rollout.prefill_chunk": max(options.prefill_chunk, requests * (layout.mtp_tokens + 1)),
    }
    fixed = {"load_format": "dummy", "skip_tokenizer_init": True}
    return (
        {names[setting]: value for setting, value in (sizes | _spread(layout) | _drafts(options)).items()}
        | fixed
        | _modes(options)
        | _node(options, names)
    )


def environment(options: Options) -> dict[str, str]:
    """Environment of the server process, before vLLM is imported: nothing depends on the layout."""
    return {}


def _spread(layout: ServerLayout) -> dict[str, Any]:
    """Values by setting, without those that are vLLM's defaults. Its sizes multiply: tensor parallel within a data-parallel group."""
    experts = layout.redundant_experts
    values = {
        "gpus": layout.tp if layout.tp > 1 else None,
        "dp": layout.dp if layout.dp > 1 else None,
        "ep": True if layout.ep > 1 else None,
        "all_to_all": _ALL_TO_ALL[layout.all_to_all] if layout.uses_deepep else None,
        "redundant_experts": None if experts is None else {"num_redundant_experts": experts},
        "kv_cache": "fp8" if layout.kv_cache == "fp8" else None,
        "weights": "fp8" if layout.weights == "fp8" else None,
        "memory_fraction": layout.memory_fraction,
        "cuda_graph_requests": _graph_sizes(layout.cuda_graph_requests or 0, layout.mtp_tokens + 1) or None,
    }
    return {f"rollout.layout.{name}": value for name, value in values.items() if value is not None}


def _graph_sizes(requests: int, tokens: int) -> list[int]:
    """Batches of up to `requests`, in tokens, of which each request has so many: as many sizes as vLLM makes by itself. Told the largest
    alone, it leaves out what is no multiple of 8 or 16, and has none at all for one request with drafts (_set_cudagraph_sizes)."""
    counts = {*(1, 2, 4), *range(8, 256, 8), *range(256, requests, 16), requests}
    return [count * tokens for count in sorted(counts) if count <= requests] if requests else []


def _drafts(options: Options) -> dict[str, Any]:
    if options.layout.mtp_tokens == 0:
        return {}
    load = {"load_format": "dummy" if options.pushes_mtp else "auto"}
    return {"rollout.layout.mtp_tokens": {"method": "mtp", "num_speculative_tokens": options.layout.mtp_tokens, "draft_load_config": load}}


def _modes(options: Options) -> dict[str, Any]:
    """Arguments that go with a setting and have none of their own."""
    own: dict[str, Any] = {}
    layout = options.layout
    if layout.redundant_experts is not None:
        own["enable_eplb"] = True
    if layout.weights == "fp8":
        own[OVERRIDES] = {"quantization_config": FP8_BLOCKS}
    if options.shares_gpus:
        own["enable_sleep_mode"] = True
    if layout.cuda_graph_requests == 0:
        own["enforce_eager"] = True
    return own


def _node(options: Options, names: Names) -> dict[str, Any]:
    """vLLM takes the data-parallel groups of a node from its rank."""
    layout = options.layout
    if layout.nodes == 1:
        return {}
    meeting = {
        names["rollout.layout.gpus_per_node"]: layout.nodes,
        "node_rank": options.node_rank,
        "master_addr": options.head,
        names["rollout.layout.port"]: layout.port,
    }
    return meeting | ({"data_parallel_rpc_port": layout.port + 1} if layout.dp > 1 else {})
