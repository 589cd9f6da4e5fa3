"""Settings of a job and of its machines: `slurm`, `kubernetes`, and `placement.gpu`, of which configs/hardware has some to choose from."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from moerl.config.schema.strict import NotNegative, Positive, Seconds, Size, Strict


@dataclass(frozen=True, kw_only=True)
class ContainerConfig(Strict):
    """Image of a job's nodes. It has moerl, the trainer's environment and the engine's (containers/ builds one): servers are started by the
    driver, or by Ray on another node, and so in the same container."""

    kind: Literal["pyxis", "apptainer"]
    """pyxis: srun's --container options, with enroot. apptainer: `apptainer exec`."""
    image: str
    """A path on shared storage, or what pyxis or apptainer can fetch."""
    mounts: tuple[str, ...] = ()
    """HOST:CONTAINER[:OPTIONS], absolute. The directory of submission is always mounted, and output_dir where that is absolute."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig(Strict):
    """Settings of `moerl launch`; without effect on a run that Slurm does not start. A job has placement.nodes nodes, whole ones."""

    gpus_per_node: NotNegative = 8
    """0: nodes without GPUs."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    """Limit, as sbatch takes it: minutes, HH:MM:SS, D-HH:MM:SS. None: the partition's."""
    segment: Positive | None = None
    """Nodes that share one block of the network (topology/block, Slurm >= 23.11)."""
    switches: Positive | None = None
    """Leaf switches at most (topology/tree)."""
    constraint: str | None = None
    """Features that the nodes must have."""
    exclude: str | None = None
    """Nodes not to use, as sbatch takes them: n[3-5],n9."""
    max_excluded: NotNegative = 2
    """So many of the nodes that a job loses are left out when it is queued again. Not more, as the cause may be the run; and none where the
    partition has too few others."""
    container: ContainerConfig | None = None
    """None: the plain environment of `python`."""
    python: str | None = None
    """Interpreter that has moerl, on every node. None: the one that launches; in a container python3."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the job, with values, e.g. HF_HOME. They stand in the script: no secrets. For NCCL and gloo: network.variables."""
    pass_environment: tuple[str, ...] = ()
    """Names of variables whose values the job takes from where it is submitted, e.g. WANDB_API_KEY. Beyond these, HOME, USER, LANG and PATH
    the job inherits nothing."""
    preflight: bool | None = None
    """Once Ray runs, moerl doctor examines the nodes and measures their links. If a node cannot carry the run, the job ends; its log says
    why, and doctor.json beside the nodes' logs. None: where nodes have GPUs."""
    start_seconds: Seconds = 600.0
    """From the first process to every node ready; a node that is missing then is named."""
    end_seconds: Annotated[int, Field(ge=30)] = 300
    """So long before the time limit Slurm asks the job to save its last step; longer than an update, a push and a checkpoint take. The job
    is then queued again."""


def has_preflight(slurm: SlurmConfig) -> bool:
    return slurm.preflight if slurm.preflight is not None else slurm.gpus_per_node > 0


@dataclass(frozen=True, kw_only=True)
class VolumeConfig(Strict):
    claim: str
    """Name of a PersistentVolumeClaim; of shared storage, as every pod mounts it."""
    path: str
    """Where pods have it; absolute."""
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig(Strict):
    """Settings of `moerl launch --kuberay`; without effect on other runs. A pod is a node: placement.nodes of them, each with
    placement.gpus_per_node GPUs."""

    image: str | None = None
    """That has moerl and everything it needs, as those of containers/; its Ray must be the version of the launching one."""
    python: str = "python3"
    """In the image."""
    namespace: str | None = None
    """None: the one kubectl uses."""
    with_gpus: bool = True
    """False: pods without GPUs."""
    cpus: Positive | None = None
    """CPUs of a pod. None: no request, and Ray takes the node's for its own."""
    memory_gb: Positive | None = None
    """Memory of a pod, in 2^30 bytes; /dev/shm counts."""
    resources: dict[str, Positive] = field(default_factory=dict)
    """More that a pod needs, as the cluster's device plugins name it, e.g. {rdma/ib: 8}."""
    volumes: tuple[VolumeConfig, ...] = ()
    """output_dir, model.path and the data's files must be on one of them."""
    secrets: dict[str, str] = field(default_factory=dict)
    """Environment variable -> SECRET/KEY of a Secret of the cluster, e.g. {WANDB_API_KEY: wandb/key}. Values never stand in a manifest."""
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[str, ...] = ()
    """Keys of taints to tolerate, beside nvidia.com/gpu."""
    queue: str | None = None
    """Queue of Kueue, which starts the job when every pod has a place."""
    retries: NotNegative = 3
    """Each is a new Ray cluster; the run goes on from its newest checkpoint."""
    max_seconds: Positive | None = None
    """Time of a cluster, anew with every retry; when it is over KubeRay ends the job for good. None: no limit."""
    end_seconds: Annotated[int, Field(ge=30)] = 300
    """A pod that must go waits so long for the run to save; longer than an update, a push and a checkpoint take."""


@dataclass(frozen=True, kw_only=True)
class GpuConfig(Strict):
    """GPU of every node."""

    name: Annotated[str, Field(min_length=1)]
    """As messages call it."""
    memory_mib: Positive
    """MiB in all, as `nvidia-smi --query-gpu=memory.total` prints them."""
    capability: Annotated[float, Field(ge=7, lt=100)]
    """Compute capability, such as 9.0: which FP8 formats there are."""
    gpus_per_domain: Size
    """GPUs that NVLink joins: those of a node, or of a rack."""
    host_memory_gib: Positive | None = None
    """Memory of a node for its processes, in GiB. None: not judged."""
    bf16_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak of dense products in bfloat16, in 1e12 operations per second; as the next one for plans of time to come."""
    fp8_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak of dense products in FP8. None: it has none."""
    memory_gb_per_second: Annotated[float, Field(gt=0)] | None = None
    """Bandwidth of the GPU's memory, in 1e9 bytes per second."""
    nvlink_gb_per_second: Annotated[float, Field(gt=0)] | None = None
    """Rate of a GPU's links to its domain, in each direction."""
    host_gb_per_second: Annotated[float, Field(gt=0)] | None = None
    """Between a GPU and host memory (PCIe, or NVLink-C2C), in each direction."""
    cards_per_node: Positive | None = None
    """Network cards for the GPUs of a node."""
    card_gbit: Annotated[float, Field(gt=0)] | None = None
    """Rate of a card, in 1e9 bits per second: `moerl plan` costs a push with it."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * 2**20
