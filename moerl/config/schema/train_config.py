"""The settings of the trainer: `train` of moerl/config/schema."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from moerl.config.schema.layout import Layout
from moerl.config.schema.strict import NotNegative, Positive, Strict

RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]

PRODUCT_ROWS = 8192
"""Rows of the output layer for which one product of a chunk, of its gradient, exists at once (moerl/train/loss/logprobs.py)."""


# -- recomputation ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NoRecompute(Strict):
    """Every activation is kept for the backward pass."""

    kind: Literal["off"] = "off"


@dataclass(frozen=True, kw_only=True)
class FullRecompute(Strict):
    """Whole transformer layers run again in the backward pass; only their inputs are kept."""

    kind: Literal["full"] = "full"
    method: Literal["uniform", "block"] = "uniform"
    """uniform: all layers, in units of num_layers, of which only the first input is kept. block: only the first num_layers of
    every model chunk."""
    num_layers: Annotated[int, Field(gt=0)] = 1
    """At most the layers of a model chunk."""


@dataclass(frozen=True, kw_only=True)
class SelectiveRecompute(Strict):
    """Only some modules run again in the backward pass."""

    kind: Literal["selective"] = "selective"
    modules: Annotated[tuple[RecomputeModule, ...], Field(min_length=1)] = ("core_attn",)
    """core_attn: attention itself (fused kernels do so anyway). layernorm: norms that are modules of their own. mla_up_proj: up
    projections and rotary embedding of multi-latent attention. mlp: dense MLPs. moe: whole mixture-of-experts layers. moe_act: the
    experts' activation function. shared_experts: the experts every token goes to."""


Recompute = Annotated[NoRecompute | FullRecompute | SelectiveRecompute, Field(discriminator="kind")]


# -- optimizer -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory(Strict):
    """Where the optimizer's states live and how wide they are."""

    cpu_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the parameters whose states stay in host memory and whose update runs there (Megatron's hybrid optimizer).
    Needs a GPU, and precision_aware."""
    cpu_overlap: bool = False
    """Copy gradients to the host and parameters back while others are updated; one optimizer object per parameter."""
    precision_aware: bool = False
    """Let Transformer Engine's FusedAdam keep master weights and moments, in the types below. Needs dtype=bfloat16."""
    main_params_dtype: Literal["float32", "float16"] = "float32"
    """Dtype of the master weights; float16 loses precision. This and the next three need precision_aware."""
    main_grads_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the gradients that micro-batches add up in and that ranks reduce."""
    exp_avg_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of Adam's first moment. float16 is scaled per tensor."""
    exp_avg_sq_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of Adam's second moment. float16 is scaled per tensor."""


# -- the trainer -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MuonConfig(Strict):
    """Muon for matrices: momentum with Nesterov's step, made nearly orthogonal. Embedding, output layer, norms and biases stay with Adam.
    Queries, keys and values are matrices of their own; each expert is one."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    update_rms: Annotated[float, Field(gt=0)] = 0.2
    """Root mean square of an update of a matrix, in units of the learning rate. About Adam's at 0.2, so that a learning rate and a weight
    decay for Adam hold for both (arXiv:2502.16982)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Strict):
    lr: Annotated[float, Field(gt=0)]
    warmup_steps: NotNegative = 0
    """Linear from lr / warmup_steps to lr, counted in RL steps."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """From the end of the warm-up to num_steps."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at which the decay ends; without effect for constant."""
    muon: MuonConfig | None = None
    """Muon instead of Adam for matrices; null for Adam alone. `muon: {}` takes its defaults."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_grad: Annotated[float, Field(gt=0)] | None = 1.0
    """Global gradient norm; None switches clipping off."""
    memory: OptimizerMemory = field(default_factory=OptimizerMemory)


@dataclass(frozen=True, kw_only=True)
class FP8Config(Strict):
    """Products of the transformer layers' linear parts with FP8 operands, forward and backward, by Transformer Engine. Parameters, router,
    norms, attention, embedding, output layer and optimizer keep their precision. Without a GPU every recipe is emulated."""

    recipe: Literal["blockwise", "tensorwise", "delayed", "mxfp8"]
    """blockwise: a scale per 1 x 128 activations or gradients and 128 x 128 weights; Hopper (compute capability 9.0) and CUDA 12.9 or
    newer. mxfp8: a scale per 32 values; Blackwell (10.0). tensorwise: one scale per tensor, from its values; Ada (8.9) or newer. delayed:
    one per tensor, from earlier passes, hence with format=hybrid; Ada."""
    format: Literal["e4m3", "hybrid"] = "e4m3"
    """hybrid: gradients in e5m2, with more range and less precision."""
    first_layers_bf16: NotNegative = 0
    last_layers_bf16: NotNegative = 0
    """So many layers at the start and at the end of the model stay in bfloat16; not for delayed. Layers of multi-token prediction never."""

    @property
    def alignment(self) -> int:
        """The tokens of a rank and the sizes of its shards are multiples of this: whole blocks, or what FP8 products demand
        (megatron/core/fp8_utils.py, get_fp8_align_size)."""
        return {"blockwise": 128, "mxfp8": 32, "tensorwise": 16, "delayed": 16}[self.recipe]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Strict):
    optimizer: OptimizerConfig
    layout: Layout = field(default_factory=Layout)
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """Dtype of parameters and activations; bfloat16 keeps float32 master weights and gradients. float64 is for comparing layouts on
    CPU, where rounding then hides nothing."""
    fp8: FP8Config | None = None
    """None: matrix products in `dtype`. Needs bfloat16."""
    micro_batch_tokens: Positive = 8192
    """Packed tokens of one micro-batch on one data-parallel rank; at least model.max_context."""
    logprob_chunk_tokens: Positive = 512
    """Tokens whose logits exist at a time: two blocks of this many rows in float32 and one in the model's dtype. Fewer save memory; some
    hundred keep a GPU busy."""
    updates_per_step: Positive = 1
    """Mini-batches (optimizer steps) a rollout batch is cut into; over 1 the trainer records old log-probs first."""
    old_logprobs: Literal["trainer", "rollout", "log_linear"] = "trainer"
    """Whose log-probs are the old policy of the ratio. trainer: recomputed before the update (free if updates_per_step=1). rollout: the
    server's. log_linear: between the server's and the policy's, by the age of the weights that sampled the token; no pass of its own."""
    router_replay: Literal["off", "trainer", "rollout"] = "off"
    """Which experts a token goes to in an update; the routers' probabilities of them, and their gradients, are always the current ones.
    off: those its routers choose. trainer (R2): those chosen in a log-prob pass before the update, which is run for this even if
    updates_per_step=1 or old_logprobs=rollout. rollout (R3, arXiv:2510.11370): those the server's routers chose when the token was
    computed for sampling, in that pass and in the update; the last token of a sequence has none. The reference routes by itself."""
    sampling_replay: Literal["off", "rollout"] = "rollout"
    """Vocabulary of log-probs where rollout.top_p or top_k leaves a part of it. rollout: for every token what the server chose from
    (arXiv:2512.02556, section 3.1); KL to the reference stays one over the whole vocabulary, and takes log-probs twice. off: the whole:
    trainer and server then differ by what was left out, which weights.mismatch_limit takes for wrong weights."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When loss or gradient is NaN or infinite no weight is changed, and the rank, micro-batch and samples are named. stop: the
    run ends with that. skip: it goes on with a warning, and the update is counted in train/skipped_updates."""
    mtp_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the cross-entropy of the model's multi-token prediction layers over response tokens. 0: these layers are not built,
    and leave as they are in the checkpoint; published runs that draft with them train them with about 0.1 to 0.2."""
    bridge: Literal["native", "mbridge", "megatron_bridge"] = "native"
    """Carrier of weights between Megatron and Hugging Face names. native: moerl/models. mbridge: the package mbridge 0.15.1
    (pip install 'moerl[mbridge]'); megatron_bridge: NVIDIA's megatron-bridge 0.3.1 (pip install --no-deps megatron-bridge==0.3.1
    triton). Both are for comparison, and the second for families that it alone declares, which need it: they gather on every rank, and
    know no layers of multi-token prediction."""
    reference_te: bool = False
    """Train on the PyTorch reference of Transformer Engine (megatron_patches/reference) where there are GPUs: correct, and far slower.
    false: GPUs without Transformer Engine are refused. Without GPUs the reference trains in any case."""
    recompute: Recompute = field(default_factory=NoRecompute)
    """Which activations are computed again in the backward pass instead of kept."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Memory that leaves the GPU while training does not need it. optimizer: outside of updates optimizer states are in pinned host memory
    and gradients are freed. all: parameters and reference weights follow while the trainer sleeps, between the steps."""
    destroy_groups: bool = False
    """End Megatron's communicators while the trainer sleeps, and with them their GPU buffers; they are made again when it wakes.
    Needs offload=all."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks bucket by bucket, while the rest of the backward pass runs."""
    overlap_param_gather: bool = False
    """Gather updated parameters from data-parallel ranks bucket by bucket, during the next forward pass."""
    overlap_bucket_size: Positive | None = None
    """Parameters per bucket. None: Megatron's choice, the larger of 40 million and a million per data-parallel rank."""
    environment: dict[str, str | int] = field(default_factory=dict)
    """Environment variables of train ranks alone, e.g. NCCL_DEBUG=INFO. Set before CUDA or a communicator is asked for, in a process that
    has started. PYTORCH_ALLOC_CONF=expandable_segments:True does not go with pushes by ipc or a relay between ranks: PyTorch hands
    such memory over by pidfd_getfd, which kernel.yama.ptrace_scope=1 forbids."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Passed to Megatron's TransformerConfig; names are checked against it, names moerl sets itself are refused."""

    @property
    def token_multiple(self) -> int:
        """Micro-batches are padded to it: for sequence and context parallelism, and so that every rank has whole FP8 blocks of tokens."""
        layout, alignment = self.layout, 1 if self.fp8 is None else self.fp8.alignment
        return math.lcm(layout.token_multiple, layout.tp * layout.cp * alignment)
