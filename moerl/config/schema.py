"""Every setting of a run, as frozen dataclasses. The one place with defaults; imports neither torch nor Megatron.

A string under a field says what it does. Values that follow from others are properties, never settings.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from moerl.config.kubernetes import KubernetesConfig
from moerl.config.placement import PlacementConfig
from moerl.config.schema_deadlines import DeadlineConfig
from moerl.config.schema_train import TrainConfig
from moerl.config.server_layout import ServerLayout
from moerl.config.slurm import SlurmConfig
from moerl.config.strict import NotNegative, Positive, Seconds, Size, Strict

# -- model -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ScratchModel(Strict):
    """A randomly initialised model with a character tokenizer, written as a Hugging Face checkpoint when the run starts."""

    family: Literal["qwen3", "qwen3_moe", "deepseek_v3"] = "qwen3_moe"
    hidden_size: Size = 128
    num_layers: Size = 4
    num_heads: Size = 4
    num_kv_heads: Size = 2
    head_dim: Size = 32
    ffn_size: Size = 128
    """Inner size of one expert (qwen3_moe, deepseek_v3) or of the MLP (qwen3)."""
    num_experts: Size = 8
    """Without effect for qwen3."""
    experts_per_token: Size = 2
    """Without effect for qwen3. deepseek_v3: even; a token's experts come from half as many of the groups of two experts."""
    mtp_layers: NotNegative = 1
    """Layers of multi-token prediction (deepseek_v3); without effect for the others."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Strict):
    path: str | None = None
    """Directory of a Hugging Face checkpoint (config.json, tokenizer, safetensors). Exactly one of path and scratch."""
    published: str | None = None
    """Which of the models in configs/published the checkpoint is. Without a path the run can be checked, not started; with one its
    config.json must describe that model."""
    scratch: ScratchModel | None = None
    max_context: Positive
    """Prompt and response together, in tokens; at most the model's max_position_embeddings."""

    @property
    def is_only_named(self) -> bool:
        """A published model without its checkpoint: a recipe that can be checked, not started."""
        return self.path is None and self.scratch is None and self.published is not None


# -- data and rewards ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _DataBase(Strict):
    shuffle: bool = True
    """A new order each epoch, a function of the run's seed and the epoch."""
    chat_template: bool = True
    """Render `prompt` with the tokenizer's chat template; false concatenates the contents of its messages."""
    max_prompt_tokens: Positive = 1024
    overlong_prompts: Literal["error", "drop"] = "error"
    """A prompt over max_prompt_tokens stops the run before it starts, or is left out with a warning."""


@dataclass(frozen=True, kw_only=True)
class FileData(_DataBase):
    """Rows in verl's schema: prompt (chat list), reward_model.ground_truth, data_source, extra_info."""

    kind: Literal["files"] = "files"
    files: tuple[str, ...]
    """.parquet or .jsonl, in order."""


@dataclass(frozen=True, kw_only=True)
class GymData(_DataBase):
    """Procedural tasks of reasoning-gym, scored by the same package."""

    kind: Literal["gym"] = "gym"
    task: str
    """Name of a reasoning-gym dataset, e.g. chain_sum."""
    args: dict[str, Any] = field(default_factory=dict)
    """Passed to the dataset's own configuration."""
    size: Positive = 1000


@dataclass(frozen=True, kw_only=True)
class TinyData(_DataBase):
    """Tasks small enough to learn from scratch on a laptop."""

    kind: Literal["tiny"] = "tiny"
    task: Literal["repeat", "add"]
    """repeat: say a digit eight times. add: the sum of two numbers below 100."""
    size: Positive = 1000


DataConfig = Annotated[FileData | GymData | TinyData, Field(discriminator="kind")]


@dataclass(frozen=True, kw_only=True)
class RewardTerm(Strict):
    kind: Literal["math", "exact", "prefix", "format", "gym", "function"]
    """math: math-verify on the last answer. exact: text equals ground_truth. prefix: share of ground_truth's positions that
    agree. format: `pattern` matches the whole text. gym: the task's own scorer. function: `path`, verl's signature."""
    weight: float = 1.0
    pattern: str | None = None
    """For format: a regular expression, matched against the whole response."""
    path: str | None = None
    """For function: `file.py:name` or `package.module:name` of f(data_source, solution_str, ground_truth, extra_info)."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Strict):
    terms: dict[str, RewardTerm]
    """The reward is the weighted sum; each term is reported under its name."""
    timeout_seconds: Seconds = 10.0
    """One check. A verifier that takes longer is killed and the sample is marked, not the run."""
    num_workers: Positive = 1


# -- algorithm -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(Strict):
    """Group-relative policy optimization, arXiv:2402.03300."""

    name: Literal["grpo"] = "grpo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """For negative advantages the loss is at most -dual_clip * advantage; None switches it off."""
    normalize_by: Literal["token", "sequence"] = "sequence"
    """token: sum over the batch / its response tokens. sequence: mean over sequences of their token means."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of KL(policy || initial model) in the loss, k3 estimate; > 0 keeps a frozen copy of the initial weights."""


@dataclass(frozen=True, kw_only=True)
class DAPOConfig(Strict):
    """Clip-higher, dynamic sampling, token-level loss, overlong shaping, arXiv:2503.14476."""

    name: Literal["dapo"] = "dapo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    max_attempts: Positive = 8
    """A step may draw at most max_attempts * groups_per_step groups before the run stops with an explanation."""
    overlong: Literal["penalty", "mask", "none"] = "penalty"
    """penalty: reward shaping near the limit. mask: truncated samples carry no loss. none: neither."""
    overlong_buffer: Positive | None = None
    """Tokens before rollout.max_response_tokens at which the penalty begins; required by overlong=penalty."""


AlgorithmConfig = Annotated[GRPOConfig | DAPOConfig, Field(discriminator="name")]


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
    """What servers listen on, for a run on one node. None: 127.0.0.1; for several nodes the address of each server's."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Of the first server, the next ones count up; 0 lets the system choose."""
    python: str | None = None
    """Interpreter of the server's environment, which must have this moerl. None: this one; for vllm and sglang that of .venv-vllm or
    .venv-sglang in the checkout."""
    max_response_tokens: Positive
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The trainer divides its logits by the same value."""
    max_running: Positive = 64
    """Requests one server decodes together."""
    max_queued: NotNegative = 2
    """Requests that wait on one server, to start without a round trip when another ends. All others wait in the driver, for the server that
    is free first: one that waits on a server cannot go to an idler one any more."""
    num_collectors: Positive = 1
    """Ray actors that receive completions from the servers and put them into Ray's object store, where the train ranks find them; a server
    has one of them. One receives some 150 completions of 4,000 tokens a second on a busy core. Without effect for fake."""
    prefill_chunk: Positive = 64
    """Prompt tokens of one request computed per engine iteration."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """None: the trainer's."""
    partial: bool = False
    """What becomes of completions that a push finds unfinished. false: they stop, and go on with the keys and values they have. true: the
    servers return what they have, and the rest is asked for after the push, from any server, which computes keys and values anew with the
    new weights. Needs max_staleness > 0."""
    max_restarts: NotNegative = 3
    """How often a server that ended, or hangs, is started again; it serves after the next push or, between updates, one of its own.
    One that ends once more stays dead, and without any the run ends."""


@dataclass(frozen=True, kw_only=True)
class WeightsConfig(Strict):
    transport: Literal["auto", "ipc", "nccl", "disk"] = "auto"
    """ipc: memory shared on one host. nccl: over the network. Buckets are where the trainer's tensors are: on GPUs by CUDA IPC and NCCL, on
    CPU by shared memory and gloo. disk: through files in the run's directory, which trainer and servers must share; slow, for servers that
    no network group reaches. auto: ipc if ranks and servers are on one host, else nccl."""
    disk_delta: bool = True
    """disk: after a first whole push write only blocks of 64 KiB that changed, compressed. Costs the trainer 8 bytes per block."""
    bucket_bytes: Positive = 256 * 2**20
    """Each training rank that sends has two buffers of this size. Larger tensors are cut by rows; an expert's larger one travels alone."""
    canary_every: NotNegative = 10
    """Compare log-probs of fixed prompts after the first push and every k-th; 0: only after the first."""
    mismatch_limit: Annotated[float, Field(gt=0)] = 1e-4
    """Largest mean |log-prob(trainer) - log-prob(rollout)| of a canary and of the first step. 1e-4 suits float32;
    bfloat16 mixture-of-experts models differ by about 3e-2, training in FP8 by several times as much."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Strict):
    async_save: bool = True
    """Ranks copy their shards to host memory and train on while these are written; the checkpoint appears when every file is on
    disk. Takes host memory of the size of the shards (about 14 bytes per parameter a rank owns). false: training waits."""
    reserve_seconds: Seconds = 120.0
    """Kept for the last checkpoint where the end of the allocation is known (moerl train --ends-at): no step begins that would not be over
    by then, if it takes as long as the longest so far."""


# -- observation and the run -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ObserveConfig(Strict):
    terminal: bool = True
    tensorboard: bool = True
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "moerl"
    dump_every: NotNegative = 10
    """Steps between sample dumps; the first and the last step are always dumped; 0 switches dumps off."""
    dump_groups: Positive = 4


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(Strict):
    """What NCCL and gloo are told of the links between nodes; `moerl doctor` prints it with reasons."""

    detect: bool = True
    """Train ranks and rollout servers get NCCL's settings from the InfiniBand ports, NVLinks and interfaces found on their node. What the
    environment already has wins. Without GPUs nothing is set."""
    interface: str | None = None
    """Network interface over which ranks meet, on every node (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), and Ray in a job of moerl launch.
    None: in such a job, and on nodes with GPUs, the one that other nodes reach; elsewhere the libraries' choice."""
    variables: dict[str, str | int] = field(default_factory=dict)
    """Environment variables of train ranks and rollout servers, e.g. NCCL_IB_SL, which only the fabric's owner can know. They win over
    detection and environment."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(Strict):
    """Supervised warm start on the data set's own answers, before the first rollout."""

    num_steps: Positive
    batch_size: Positive
    lr: Annotated[float, Field(gt=0)]
    warmup_steps: NotNegative = 0


@dataclass(frozen=True, kw_only=True)
class EvalDataset(Strict):
    data: DataConfig
    """Asked in its own order (shuffle: a function of eval.seed)."""
    reward: RewardConfig | None = None
    """Who scores it. None: the run's reward."""
    num_prompts: Positive | None = None
    """At most so many, the first of its order. None: all."""
    samples: Positive = 1
    """Of each prompt: n."""
    pass_at: tuple[Positive, ...] = (1,)
    """Every k of pass@k: the chance that one of k samples passes, estimated from n without bias (arXiv:2107.03374). At most n. For k=1
    it is the share of samples that pass (mean@n)."""
    pass_reward: float | None = None
    """A sample passes with this reward or a higher one. None: with the most that the terms give if each is at most 1."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Strict):
    """What `moerl eval` measures, and a run while it trains."""

    datasets: dict[str, EvalDataset]
    """By the names that metrics and files have."""
    every: NotNegative = 0
    """Steps between evaluations of a run, which begin before the first step and end after the last; 0: only `moerl eval` evaluates."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0: the likeliest token always, hence one sample of a prompt."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_response_tokens: Positive | None = None
    """None: rollout.max_response_tokens."""
    seed: int = 1
    """Of the rows that kind=tiny and kind=gym make up, of the order, and of sampling. Other than the run's, whose rows it trains on."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Strict):
    name: str
    """The run's directory is output_dir/name; the same command resumes it."""
    num_steps: Positive
    groups_per_step: Positive
    group_size: Positive
    """Samples per prompt."""
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    algorithm: AlgorithmConfig
    train: TrainConfig
    rollout: RolloutConfig
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    sft: SFTConfig | None = None
    eval: EvalConfig | None = None
    output_dir: str = "runs"
    seed: int = 0
    max_staleness: NotNegative = 0
    """Steps by which a group's weights may be older than the trainer's. 0: rollout and training alternate."""
    save_every: NotNegative = 10
    """Steps between checkpoints; the last step is always saved; 0: only the last."""
    keep_checkpoints: Positive = 2
    deterministic: bool = False
    """Fixed engine batch shapes, so that a completion does not depend on its neighbours: the same command gives the same
    bits. Needs max_staleness=0."""

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name

    @property
    def needs_old_logprobs(self) -> bool:
        """With one update per step the old policy is the policy itself, and no extra pass is needed."""
        return self.train.old_logprobs == "trainer" and self.train.updates_per_step > 1

    @property
    def records_routes(self) -> bool:
        """The trainer runs a log-prob pass in which it notes where tokens go."""
        return self.train.router_replay == "trainer"

    @property
    def uses_reference(self) -> bool:
        return isinstance(self.algorithm, GRPOConfig) and self.algorithm.kl_coefficient > 0

    @property
    def rollout_dtype(self) -> str:
        return self.rollout.dtype if self.rollout.dtype is not None else self.train.dtype
