"""Settings of rollout servers and of what brings them weights: `rollout`, `weights`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from moerl.config.schema.strict import NotNegative, Positive, Size, Strict
from moerl.types.engine_traits import TRAITS, EngineTraits

MOST_LEFT = 4096
"""Entries of the vocabulary that SGLang says it left of a token, at most (its sampling_mask_max_tokens)."""
NUM_PORTS = 16
"""In a row, on the first node of a server of several: SGLang's data-parallel attention takes the port of its store and the 13 after it."""


@dataclass(frozen=True, kw_only=True)
class ServerLayout(Strict):
    """Layout of every server alike. The defaults are one process on one GPU."""

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
    """dtype: rollout.dtype. fp8: e4m3 in blocks of 128 x 128 with a scale each, as DeepSeek-V3 is published, made of rollout.dtype by the
    ranks that send. Scales are powers of two where the engine's kernels on placement.gpu take no others. Log-probs differ from the
    trainer's accordingly: weights.mismatch_limit must allow it."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of a GPU's memory, for weights, keys and values. None: the engine's own choice."""
    mtp_tokens: NotNegative = 0
    """Tokens that the model's layer of multi-token prediction drafts for each that is decoded. Pushes bring it where it is trained
    (train.mtp_loss > 0). Else it stays the checkpoint's: the further training goes, the fewer drafts are accepted."""
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
        """Nodes of one server."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def uses_deepep(self) -> bool:
        return self.all_to_all != "gather"


@dataclass(frozen=True, kw_only=True)
class TLSConfig(Strict):
    """Files of TLS between a run's processes and its rollout servers, in PEM, by absolute paths that every node has. They are read when a
    server or a collector starts; renewed ones count from its next start."""

    certificate: str
    """Certificate that every server shows, and those between it and the authority after it. Its subjectAltName must have the hosts of all
    servers: of a run on one node IP:127.0.0.1 (or rollout.host), of several the nodes' addresses as Ray has them."""
    key: str
    """Private key of the certificate, without a passphrase. Servers alone read it."""
    authority: str
    """Certificates of the authorities that the driver and the collectors trust; they trust no others, and check the host's name."""


# -- rollout, weights -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Strict):
    engine: Literal["hf", "vllm", "sglang", "fake"] = "hf"
    """hf: transformers, as moerl runs it. vllm, sglang: in an environment of their own, which `make engines` builds for CPU. fake: random
    tokens, without a model."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Passed to vllm or sglang: names of its command line, with underscores; checked by its own parser. Names moerl sets are refused."""
    num_servers: Size = 1
    layout: ServerLayout = field(default_factory=ServerLayout)
    """GPUs and nodes of each server, and how the model is spread over them. One process by default."""
    host: str | None = None
    """Address that servers listen on, for a run on one node. None: 127.0.0.1; for several nodes the address of each server's."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first server, the next ones count up; 0 lets the system choose."""
    tls: TLSConfig | None = None
    """HTTP between the driver, collectors and servers over TLS. None: not encrypted. The tensors of a push go other ways."""
    environment: dict[str, str | int] = field(default_factory=dict)
    """Environment variables of rollout servers alone, e.g. VLLM_LOGGING_LEVEL. With any, servers of hf are executed, and not forked, which
    takes some seconds more."""
    python: str | None = None
    """Interpreter of the server's environment, which must have this moerl. None: this one; for vllm and sglang that of .venv-vllm or
    .venv-sglang in the checkout."""
    max_response_tokens: Positive
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The trainer divides its logits by the same value."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Samples are drawn from the smallest set of most probable tokens that has this probability. Below 1 the server's log-probs are of that
    set, and so are the trainer's (train.sampling_replay). hf, and sglang with a top_k."""
    top_k: NotNegative = 0
    """The same of so many tokens at most; 0: no bound."""
    max_running: Positive = 64
    """Requests one server decodes together. hf with deterministic=true computes as many rows for every token, however few requests there
    are: with more servers it should be a server's share of them."""
    max_queued: NotNegative = 2
    """Requests that wait on one server, to start without a round trip when another ends. All others wait in the driver, for the server that
    is free first: one that waits on a server cannot go to an idler one any more."""
    cache_high: float = 0.9
    """Share of a server's cache of keys and values above which it gets no new request, until answers have made room: an engine whose cache
    is full throws away what it has computed for a request, and computes it again. So a server has fewer requests than max_running +
    max_queued while its cache has no room for as many. At 1 only such preemptions count as pressure."""
    num_collectors: Positive | None = None
    """Ray actors that receive completions from the servers and put them into Ray's object store, where the train ranks find them, on
    the nodes of the servers, whose answers they share. None: one for each node with servers, more where the longest samples of a step would
    take over 10 s, up to ten on a node; moerl check prints how many, and the seconds. Without effect for fake."""
    prefill_chunk: Positive = 64
    """Tokens of prompts computed per engine iteration. hf: of each request. sglang: of all requests of a data-parallel group together.
    vllm: likewise, with those that are decoded, but at least one for each request; its build for CPU computes prompts whole."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """None: the trainer's."""
    partial: bool = False
    """Completions that a push finds unfinished. false: they stop, and go on with the keys and values they have. true: the
    servers return what they have, and the rest is asked for after the push, from any server, which computes keys and values anew with the
    new weights. Needs max_staleness > 0."""
    max_restarts: NotNegative = 3
    """How often a server that ended, or hangs, is started again; it serves after the next push or, between updates, one of its own.
    One that ends once more stays dead, and without any the run ends."""

    @property
    def authority(self) -> Path | None:
        """File of the authorities that clients of its servers trust; None: plain HTTP."""
        return None if self.tls is None else Path(self.tls.authority)

    @property
    def traits(self) -> EngineTraits:
        return TRAITS[self.engine]


@dataclass(frozen=True, kw_only=True)
class WeightsConfig(Strict):
    transport: Literal["auto", "ipc", "nccl", "disk"] = "auto"
    """ipc: memory shared on one host. nccl: over the network. Buckets are where the trainer's tensors are: on GPUs by CUDA IPC and NCCL, on
    CPU by shared memory and gloo. disk: through files in the run's directory, which trainer and servers must share; slow, for servers that
    no network group reaches. auto: ipc if ranks and servers are on one host, else nccl. Where servers share the trainer's GPUs nccl
    joins the trainer's ranks alone, and these lend to the servers of their nodes as ipc does."""
    disk_delta: bool = True
    """disk: after a first whole push write only blocks of 64 KiB that changed, compressed. Costs the trainer 8 bytes per block."""
    bucket_bytes: Positive = 256 * 2**20
    """Each training rank that sends has two buffers of this size. Larger tensors are cut by rows; an expert's larger one travels alone."""
    canary_every: NotNegative = 10
    """Compare log-probs of fixed prompts after the first push and every k-th; 0: only after the first."""
    mismatch_limit: Annotated[float, Field(gt=0)] | None = None
    """Largest mean |log-prob(trainer) - log-prob(rollout)| of a canary and of each server in every step, there with room for the
    few tokens of one (docs/design/weights.md). None: 1e-4, but 0.1 with train.dtype=bfloat16, in which mixture-of-experts models
    differ by about 3e-2, and 0.2 where trainer or servers compute in FP8."""
