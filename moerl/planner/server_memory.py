"""Memory of a rollout server's GPUs: weights, and how many requests the rest holds keys and values of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moerl.config.schema.run_config import RunConfig
from moerl.models.families.family_table import FAMILIES
from moerl.planner import fixed_memory as fixed
from moerl.planner.parameter_counts import model_parameters
from moerl.planner.saved_activations import WIDTHS

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """Bytes of each GPU of a server, of vLLM or SGLang."""

    weights: int
    """At least: every tensor cut over all GPUs that may share it, FP8 as if nothing stayed wider."""
    token: int
    """Keys and values of a token of a request."""
    available: int | None
    """Memory for weights, keys and values. None: nothing says how much there is."""
    runtime: int
    """Bytes that the server needs beside it while it serves."""
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
    others, experts = model_parameters(hf)
    wide = 1 if layout.weights == "fp8" else WIDTHS[config.rollout_dtype]
    available = None
    if gpu is not None:
        memory = gpu.memory_mib * fixed.MIB
        # Of vLLM what it computes with is in its share, and was measured before caches were made: at least its context.
        available = int(memory * fixed.static_fraction(rollout, memory)) - (fixed.CUDA_CONTEXT if rollout.engine == "vllm" else 0)
    runtime = fixed.CUDA_CONTEXT if rollout.engine == "vllm" else fixed.ENGINE_ASLEEP
    return ServerMemory(
        weights=(others // layout.tp + experts // layout.gpus) * wide,
        token=token_bytes(hf, config),
        available=available,
        runtime=runtime,
        groups=layout.dp,
    )


def token_bytes(hf: Mapping[str, Any], config: RunConfig) -> int:
    """Bytes on each GPU: latent attention keeps one vector for all heads, on every GPU; else a GPU has its share of the key/value heads, at
    least one."""
    fields, layout = FAMILIES[hf["model_type"]].transformer_config(hf), config.rollout.layout
    wide = 1 if layout.kv_cache == "fp8" else WIDTHS[config.rollout_dtype]
    if fields.get("multi_latent_attention"):
        values = fields["kv_lora_rank"] + fields["qk_pos_emb_head_dim"]
    else:
        values = 2 * -(-fields["num_query_groups"] // layout.tp) * fields["kv_channels"]
    return fields["num_layers"] * values * wide
