"""Memory of a rollout server's GPUs: weights, and how many requests the rest holds keys and values of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moerl.config.derive.model_shape import shape_of_config
from moerl.config.schema.run_config import RunConfig
from moerl.models.find_family import find_family
from moerl.models.parameter_shapes import is_delta_net
from moerl.planner import fixed_memory as fixed
from moerl.planner.layer_activations import WIDTHS
from moerl.planner.parameter_counts import server_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """Bytes of each GPU of a server, of vLLM or SGLang."""

    weights: int
    """FP8 as if nothing stayed wider."""
    unsent: int
    """Weights that no push brings, among these: a drafting layer that is not trained; in host memory while the server sleeps."""
    token: int
    """Keys and values of a token of a request."""
    available: int | None
    """Memory for weights, keys and values. None: nothing says how much there is."""
    runtime: int
    """Bytes that the server needs beside it while it serves."""
    margin: int
    """Bytes it may need on top: SGLang leaves so much for activations, graphs and workspaces."""
    received: int
    """Bytes of a push that wait there for the rest of their tensors."""
    groups: int
    """Data-parallel groups of attention, each with requests of its own."""

    @property
    def serving(self) -> int:
        """On the GPU while it serves: it takes all that is available."""
        return (self.weights if self.available is None else self.available) + self.runtime

    @property
    def cache(self) -> int:
        """Room for keys and values; negative: weights do not fit."""
        assert self.available is not None
        return self.available - self.weights

    def requests(self, num_tokens: int) -> int:
        """Requests of so many tokens each that a whole server holds at once."""
        return max(0, self.cache) // (self.token * num_tokens) * self.groups


def server_memory(hf: Mapping[str, Any], config: RunConfig) -> ServerMemory:
    rollout, layout, gpu = config.rollout, config.rollout.layout, config.placement.gpu
    is_sglang = rollout.engine == "sglang"
    drafts = layout.mtp_tokens > 0
    weights = _weights(hf, config, drafts=drafts)
    available = None
    if gpu is not None:
        # Of vLLM what it computes with is in its share, and was measured before caches were made: at least its context.
        share = fixed.static_fraction(rollout, gpu.memory_bytes)
        available = int(gpu.memory_bytes * share) - (0 if is_sglang else fixed.CUDA_CONTEXT)
    return ServerMemory(
        weights=weights,
        unsent=weights - _weights(hf, config, drafts=False) if drafts and not config.pushes_mtp else 0,
        token=token_bytes(hf, config),
        available=available,
        runtime=fixed.ENGINE_ASLEEP if is_sglang else fixed.CUDA_CONTEXT,
        margin=fixed.SGLANG_RUNTIME - fixed.ENGINE_ASLEEP if is_sglang else 0,
        received=0 if is_sglang else fixed.RECEIVED,
        groups=layout.dp,
    )


def _weights(hf: Mapping[str, Any], config: RunConfig, *, drafts: bool) -> int:
    """Bytes on each GPU; `drafts`: with a drafting layer."""
    layout, is_sglang = config.rollout.layout, config.rollout.engine == "sglang"
    others, experts = server_parameters(
        hf,
        tp=layout.tp,
        dense_tp=1 if is_sglang and layout.dp > 1 else layout.tp,  # moe_dense_tp_size
        shared_tp=1 if is_sglang and layout.uses_deepep else layout.tp,
        drafts=drafts,
    )
    if layout.redundant_experts is not None and (number := shape_of_config(hf).num_experts) is not None:
        experts = experts * (number + layout.redundant_experts) // number
    return (others + experts // layout.gpus) * (1 if layout.weights == "fp8" else WIDTHS[config.rollout_dtype])


def token_bytes(hf: Mapping[str, Any], config: RunConfig) -> int:
    """Bytes on each GPU: latent attention keeps one vector for all heads, and one for an indexer, on every GPU; else a GPU has its share of
    the key/value heads, at least one."""
    fields, layout = find_family(hf).transformer_config(hf), config.rollout.layout
    wide = 1 if layout.kv_cache == "fp8" else WIDTHS[config.rollout_dtype]
    if fields.get("multi_latent_attention"):
        values = fields["kv_lora_rank"] + fields["qk_pos_emb_head_dim"] + fields.get("dsa_indexer_head_dim", 0)
    else:
        values = 2 * -(-fields["num_query_groups"] // layout.tp) * fields["kv_channels"]
    delta_nets = sum(is_delta_net(fields, layer) for layer in range(fields["num_layers"]))  # their memory does not grow with tokens
    return (fields["num_layers"] - delta_nets + (layout.mtp_tokens > 0)) * values * wide
