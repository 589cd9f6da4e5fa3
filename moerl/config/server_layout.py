"""How one rollout server is spread over GPUs and nodes: its sizes, and what follows from them. The rules are in server_layout_rules.py."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from moerl.config.strict import NotNegative, Size, Strict

NUM_PORTS = 16
"""In a row, on the first node of a server of several: SGLang's data-parallel attention takes the port of its store and the 13 after it."""


@dataclass(frozen=True, kw_only=True)
class ServerLayout(Strict):
    """Of every server alike. The defaults are one process on one GPU."""

    gpus: Size = 1
    """GPUs of one server, over all its nodes. On CPU: processes."""
    gpus_per_node: Size = 8
    """Servers fill nodes, or nodes fill servers."""
    dp: Size = 1
    """Data-parallel groups of attention. Each has requests of its own, and attention is tensor parallel over the gpus / dp GPUs of a group.
    Without, models with few key/value heads, or latent attention, would hold the keys and values of a request many times."""
    ep: Size = 1
    """Expert parallel: GPUs over which whole experts are spread; each expert is cut over gpus / ep of them."""
    all_to_all: Literal["gather", "deepep", "deepep_normal", "deepep_low_latency"] = "gather"
    """How tokens reach their experts. gather: every GPU of the server gets all of them. deepep: DeepEP's kernels, those made for
    throughput on prompts and those made for latency while decoding. deepep_normal, deepep_low_latency: one kind of them always."""
    redundant_experts: NotNegative | None = None
    """Copies of busy experts in every layer, beyond the model's own (EPLB, which also moves experts between GPUs). 0: it only moves
    them. None: off."""
    kv_cache: Literal["auto", "fp8"] = "auto"
    """auto: rollout.dtype. fp8: half of that, and log-probs that differ from the trainer's by as much."""
    weights: Literal["dtype", "fp8"] = "dtype"
    """dtype: rollout.dtype. fp8: e4m3 in blocks of 128 x 128 with float32 scales, as DeepSeek-V3 is published, made of rollout.dtype by the
    ranks that send. Log-probs differ from the trainer's accordingly: weights.mismatch_limit must allow it."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of a GPU's memory, for weights, keys and values. None: the engine's own choice."""
    mtp_tokens: NotNegative = 0
    """Tokens that the model's layer of multi-token prediction drafts for each that is decoded. It stays the checkpoint's, which pushes do
    not bring: the further training goes, the fewer drafts are accepted."""
    cuda_graph_requests: NotNegative | None = None
    """Largest batch of one data-parallel group that decodes in a CUDA graph. 0: no graphs. None: the engine's own choice."""
    port: Annotated[int, Field(ge=0, le=65535 - NUM_PORTS)] = 0
    """On the first node of a server, where its nodes meet, and the 15 after it. 0: free ones, chosen on that node whenever the server
    starts. Without effect on one node."""

    @property
    def tp(self) -> int:
        """Tensor parallel size of attention."""
        return self.gpus // self.dp

    @property
    def expert_tp(self) -> int:
        """GPUs over which one expert is cut."""
        return self.gpus // self.ep

    @property
    def nodes(self) -> int:
        """Of one server."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def uses_deepep(self) -> bool:
        return self.all_to_all != "gather"
