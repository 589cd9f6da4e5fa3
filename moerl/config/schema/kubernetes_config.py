"""Settings of a job of KubeRay: `kubernetes`."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from moerl.config.schema.strict import NotNegative, Positive, Strict


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
    """That has moerl and everything it needs; its Ray must be the version of the launching one."""
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
    """Time of the whole job, retries too; then KubeRay ends it for good. None: no limit."""
    end_seconds: Annotated[int, Field(ge=30)] = 300
    """A pod that must go waits so long for the run to save; longer than an update, a push and a checkpoint take."""
