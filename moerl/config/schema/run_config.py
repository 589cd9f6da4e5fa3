"""Settings of a run, as frozen dataclasses; its sections are the other files of this folder. Imports neither torch nor Megatron.

A string under a field says what it does. Values that follow from others are properties, never settings.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from moerl.config.schema.algorithm_config import AlgorithmConfig
from moerl.config.schema.companion_config import CriticConfig, DistillationConfig, OutcomeModelConfig
from moerl.config.schema.data_config import DataConfig, EvalConfig, RewardConfig
from moerl.config.schema.deadlines import DeadlineConfig
from moerl.config.schema.job_config import GpuConfig, KubernetesConfig, SlurmConfig
from moerl.config.schema.model_config import ModelConfig
from moerl.config.schema.rollout_config import RolloutConfig, WeightsConfig
from moerl.config.schema.strict import NotNegative, Positive, Seconds, Size, Strict
from moerl.config.schema.train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class PlacementConfig(Strict):
    mode: Literal["separate", "colocated", "group_colocated"] = "separate"
    """separate: rollout servers have GPUs of their own. colocated: all of them are on the trainer's; the two have these in turn, hence
    max_staleness=0. group_colocated: the first num_shared servers are on the trainer's GPUs and sleep while it trains; the others have
    their own and go on, also with requests the first ones had begun. What shares GPUs needs train.offload=all."""
    num_shared: Positive | None = None
    """Servers on the trainer's GPUs, for group_colocated: at least 1, and not all of them."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the GPUs of the nodes, or CPU where they have none; more processes than GPUs are refused. cpu: no process of the run sees a
    GPU."""
    nodes: Size = 1
    """A job of Slurm or Kubernetes has as many."""
    gpus_per_node: Size | None = None
    """GPUs the run may use on every node. Where there are none: training ranks and servers that a node takes. None: one node, which takes
    all."""
    nodes_per_domain: Size = 1
    """Nodes, one after the other in the topology's order, whose GPUs NVLink joins: groups that fit stay inside."""
    gpu: GpuConfig | None = None
    """GPU of every node: one of configs/hardware, as hardware=h100-80, or one's own. Layouts whose memory it cannot hold, FP8 formats that
    it lacks and domains of NVLink that it does not form are refused. None: nothing is judged."""
    topology: str | None = None
    """File in the format of Slurm's topology.conf: nodes under one switch become neighbours. None: in the order of their names."""


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
    """Links between nodes, as NCCL and gloo are told of them; `moerl doctor` prints it with reasons."""

    detect: bool = True
    """Train ranks and rollout servers get NCCL's settings from the InfiniBand ports, NVLinks and interfaces found on their node. What the
    environment already has wins. Without GPUs nothing is set but how gloo connects ranks."""
    interface: str | None = None
    """Network interface over which ranks meet, on every node (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), and Ray in a job of moerl launch.
    None: in such a job, and on nodes with GPUs, the one that other nodes reach; loopback for gloo of a single node; elsewhere the
    libraries' choice."""
    variables: dict[str, str | int] = field(default_factory=dict)
    """Environment variables of train ranks and rollout servers, e.g. NCCL_IB_SL, which only the fabric's owner can know. They win over
    detection and environment."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(Strict):
    """Supervised warm start on the data set's own answers, before the first rollout: cross-entropy of what is sampled, so at
    rollout.temperature. All else of its optimizer, as its decay, is train.optimizer's."""

    num_steps: Positive
    batch_size: Positive
    lr: Annotated[float, Field(gt=0)]
    warmup_steps: NotNegative = 0


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
    critic: CriticConfig = field(default_factory=CriticConfig)
    outcome_model: OutcomeModelConfig = field(default_factory=OutcomeModelConfig)
    distillation: DistillationConfig | None = None
    sft: SFTConfig | None = None
    eval: EvalConfig | None = None
    output_dir: str = "runs"
    seed: int = 0
    max_staleness: NotNegative = 0
    """Steps by which a group's weights may be older than the trainer's. 0: rollout and training alternate."""
    groups_in_flight: Positive | None = None
    """Groups begun and not trained at any time. None: (max_staleness + 1) * (groups_per_step + spare_groups); without spare_groups every
    step trains the oldest. Fewer: groups begin later, so that most are less stale, and the steps this leaves are for stragglers: as many
    younger groups may train before one that is unfinished as are left out here, and no group trains later than max_staleness allows. More
    than groups_per_step."""
    spare_groups: NotNegative = 0
    """Groups that a step begins beyond groups_per_step. The first to finish train; the others are put off until there are enough of them
    for a step of their own, and begin anew with the weights of that time, their tokens lost. Every prompt that was drawn trains before the
    run ends; answers that chance made long come out shorter, those that are long because of their prompt do not. A quarter of
    groups_per_step is a good number. 0: none is put off."""
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
    def most_groups(self) -> int:
        """Groups begun and not trained, at any time."""
        if self.groups_in_flight is not None:
            return self.groups_in_flight
        return (self.max_staleness + 1) * (self.groups_per_step + self.spare_groups)

    @property
    def needs_old_logprobs(self) -> bool:
        """With one update per step the old policy is the policy itself: no extra pass, unless the algorithm looks at it before."""
        asks = self.train.updates_per_step > 1 or (self.trains_rewards and "old_logprobs" in self.algorithm.needs)
        return self.train.old_logprobs == "trainer" and asks

    @property
    def mismatch_limit(self) -> float:
        """weights.mismatch_limit, or what the numbers of trainer and servers explain."""
        if self.weights.mismatch_limit is not None:
            return self.weights.mismatch_limit
        if self.train.fp8 is not None or self.rollout.layout.weights == "fp8":
            return 0.2
        return 0.1 if self.train.dtype == "bfloat16" else 1e-4

    @property
    def pushes_mtp(self) -> bool:
        """Layers of multi-token prediction are trained, and servers draft with them."""
        return self.train.mtp_loss > 0 and self.rollout.layout.mtp_tokens > 0

    @property
    def trains_rewards(self) -> bool:
        """The algorithm's objective is part of the loss."""
        return self.distillation is None or self.distillation.trains_rewards

    @property
    def num_critic_steps(self) -> int:
        """First steps in which the critic alone learns."""
        return self.critic.warmup_steps if "values" in self.algorithm.needs else 0

    @property
    def filters_samples(self) -> bool:
        """Samples are drawn from a part of the vocabulary."""
        return self.rollout.top_p < 1 or self.rollout.top_k > 0

    @property
    def replays_sets(self) -> bool:
        """The trainer's log-probs are of what each token was chosen from."""
        return self.filters_samples and self.train.sampling_replay == "rollout"

    @property
    def records_routes(self) -> bool:
        """The trainer runs a log-prob pass in which it notes where tokens go."""
        return self.train.router_replay == "trainer"

    @property
    def uses_reference(self) -> bool:
        return "reference" in self.algorithm.needs and self.trains_rewards

    @property
    def credits_tokens(self) -> bool:
        """Advantages of tokens are made before the update."""
        return self.algorithm.credits_tokens and self.trains_rewards

    @property
    def fp8_scales(self) -> Literal["float32", "ue8m0"] | None:
        """Form of the scales that a push brings, as the servers' kernels take them: DeepGEMM's scales are powers of two (UE8M0) in SGLang
        from Blackwell on and in vLLM from Hopper on, and an engine that got others would round the values once more. None: no FP8."""
        if self.rollout.layout.weights != "fp8":
            return None
        gpu, least = self.placement.gpu, self.rollout.traits.ue8m0_from
        return "ue8m0" if gpu is not None and least is not None and gpu.capability >= least else "float32"

    @property
    def rollout_dtype(self) -> str:
        return self.rollout.dtype if self.rollout.dtype is not None else self.train.dtype
