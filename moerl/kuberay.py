"""A run as a RayJob of KubeRay, rendered from its configuration: one pod per node, the first of them Ray's head and the driver's.

    RayJob -> RayCluster (head pod, worker pods) -> submitter -> `moerl doctor` and `moerl train` on the head pod

What the driver saves is all that a retry needs: KubeRay makes a new cluster, and the same command goes on. Fields: KubeRay's API reference,
ray.io/v1, 1.5.1 and later (authOptions); what the operator makes of them: its controllers/ray/common/job.go.
"""

import importlib.metadata
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

import yaml

from moerl.config.compose import compose
from moerl.config.derive.gpu_map import num_gpus
from moerl.config.load import Check, build
from moerl.config.rules.facts import facts_of
from moerl.config.rules.job_rules import job_name, launch_problems
from moerl.config.schema.job_config import VolumeConfig
from moerl.config.schema.run_config import RunConfig
from moerl.config.validate import validate
from moerl.types.errors import ConfigError, MoerlError

_SETTLE_SECONDS = 30
"""After the run has saved: for Ray to end, and for a hook's own start."""
_TTL_SECONDS = 60
"""The cluster outlasts the job by so much: at 0 the submitter may lose the end of the log."""
_LABEL = "moerl/run"


def load_for_pods(overrides: Sequence[str], config_dir: Path | None = None, *, checks: Sequence[Check] = ()) -> RunConfig:
    """As `moerl.config.load.load`; but the model may be on a volume that only pods have, where model.published says what it is."""
    config = build(compose(overrides, config_dir))
    model, path = config.model, config.model.path
    is_elsewhere = path is not None and model.published is not None and not Path(path).exists()
    checked = replace(config, model=replace(model, path=None)) if is_elsewhere else config
    facts = facts_of(checked.model)
    problems = [found for check in (validate, *checks) for found in check(checked, facts)]
    problems = [found for found in problems if not (is_elsewhere and found.path == "model.path")]
    if problems:
        raise ConfigError(problems)
    return config


def render_rayjob(config: RunConfig, overrides: Sequence[str], config_dir: Path | None = None) -> str:
    """The manifest, as YAML. Pods compose the configuration from the same `overrides`. ConfigError if the run cannot be a RayJob."""
    if problems := list(launch_problems(config, None if config_dir is None else str(config_dir))):
        raise ConfigError(problems)
    kubernetes, name = config.kubernetes, job_name(config.name)
    labels = {} if kubernetes.queue is None else {"labels": {"kueue.x-k8s.io/queue-name": kubernetes.queue}}
    namespace = {} if kubernetes.namespace is None else {"namespace": kubernetes.namespace}
    limit = {} if kubernetes.max_seconds is None else {"activeDeadlineSeconds": kubernetes.max_seconds}
    spec = {
        "entrypoint": _entrypoint(config, overrides, config_dir).replace("$", "$$"),
        "submissionMode": "K8sJobMode",
        "backoffLimit": kubernetes.retries,
        "submitterConfig": {"backoffLimit": 2},
        "submitterPodTemplate": _submitter(config),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _TTL_SECONDS,
        **limit,
        "rayClusterSpec": _cluster(config),
    }
    job = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name, **namespace, **labels}, "spec": spec}
    return _TITLE.format(name=config.name) + yaml.dump(job, Dumper=_Plain, sort_keys=False, width=140)


def create_rayjob(manifest: str) -> str:
    """Answer of kubectl. MoerlError with its own words if it refuses."""
    program = shutil.which("kubectl")
    if program is None:
        raise MoerlError("kubectl is not on PATH here: launch where it is, or take the manifest of --dry-run there")
    # Not apply: a second job with this name would train the same run.
    done = subprocess.run([program, "create", "-f", "-"], input=manifest, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MoerlError(f"kubectl refused the job (exit code {done.returncode}):\n{done.stderr.strip()}")
    return done.stdout.strip()


def _entrypoint(config: RunConfig, overrides: Sequence[str], config_dir: Path | None) -> str:
    """One simple command: KubeRay writes it unquoted into the submitter's own script, whose shell would run what follows an `&&` itself.
    It is an argument of the submitter's container, where Kubernetes takes $(NAME) for a variable and $$ for one $."""
    options = [] if config_dir is None else [f"--config-dir={config_dir}"]
    words = [*options, *overrides]
    moerl, gpus = [config.kubernetes.python, "-m", "moerl"], _gpus(config)
    train = [*moerl, "train", *words]
    if not gpus:
        return shlex.join(train)
    doctor = [*moerl, "doctor", f"--nodes={config.placement.nodes}", f"--gpus-per-node={gpus}", "--fix", *words]
    return shlex.join(["/bin/sh", "-c", f"{shlex.join(doctor)} && exec {shlex.join(train)}"])


def _cluster(config: RunConfig) -> dict[str, Any]:
    workers = config.placement.nodes - 1
    group = {
        "groupName": "nodes",
        "replicas": workers,
        "minReplicas": workers,
        "maxReplicas": workers,
        "rayStartParams": {},
        "template": _pod(config, "ray-worker", on_head=False),
    }
    return {
        "rayVersion": importlib.metadata.version("ray"),
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0"}, "template": _pod(config, "ray-head", on_head=True)},
        **({"workerGroupSpecs": [group]} if workers else {}),
    }


def _pod(config: RunConfig, container: str, *, on_head: bool) -> dict[str, Any]:
    kubernetes = config.kubernetes
    tolerated = [*(["nvidia.com/gpu"] if kubernetes.with_gpus else []), *kubernetes.tolerations]
    selector = {"labelSelector": {"matchLabels": {_LABEL: job_name(config.name)}}, "topologyKey": "kubernetes.io/hostname"}
    spec = {
        # The same container again would be a node of Ray that the cluster has given up.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": kubernetes.end_seconds + _SETTLE_SECONDS,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [selector]}},
        **({"nodeSelector": dict(kubernetes.node_selector)} if kubernetes.node_selector else {}),
        **({"tolerations": [{"key": key, "operator": "Exists"} for key in tolerated]} if tolerated else {}),
        "containers": [_container(config, container, on_head=on_head)],
        "volumes": [*starmap(_volume, enumerate(kubernetes.volumes)), {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    return {"metadata": {"labels": {_LABEL: job_name(config.name)}}, "spec": spec}


def _container(config: RunConfig, name: str, *, on_head: bool) -> dict[str, Any]:
    kubernetes = config.kubernetes
    resources = dict(_resources(config))
    mounts = [
        {"name": f"volume-{index}", "mountPath": volume.path, "readOnly": volume.read_only}
        for index, volume in enumerate(kubernetes.volumes)
    ]
    where = "" if on_head else ' --address="$RAY_ADDRESS"'
    end = f"exec {shlex.quote(kubernetes.python)} -m moerl end {shlex.quote(str(config.run_dir))} --seconds={kubernetes.end_seconds}{where}"
    return {
        "name": name,
        "image": kubernetes.image,
        # The process group's buffers and InfiniBand's are locked memory.
        **({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if kubernetes.resources else {}),
        **({"resources": {"requests": resources, "limits": resources}} if resources else {}),
        "env": list(_environment(config)),
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", end]}}},
    }


def _resources(config: RunConfig) -> Iterator[tuple[str, int | str]]:
    kubernetes, gpus = config.kubernetes, _gpus(config)
    if kubernetes.cpus is not None:
        yield "cpu", kubernetes.cpus
    if kubernetes.memory_gb is not None:
        yield "memory", f"{kubernetes.memory_gb}Gi"
    if gpus:
        yield "nvidia.com/gpu", gpus
    yield from kubernetes.resources.items()


def _gpus(config: RunConfig) -> int:
    """GPUs of a pod."""
    if not config.kubernetes.with_gpus:
        return 0
    return config.placement.gpus_per_node if config.placement.gpus_per_node is not None else num_gpus(config)


def _environment(config: RunConfig) -> Iterator[dict[str, Any]]:
    # `ray job stop` would end a run that is saving after 3 s.
    yield {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(config.kubernetes.end_seconds)}
    for variable, source in config.kubernetes.secrets.items():
        secret, _, key = source.partition("/")
        yield {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _volume(index: int, volume: VolumeConfig) -> dict[str, Any]:
    return {"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": volume.claim, "readOnly": volume.read_only}}


def _submitter(config: RunConfig) -> dict[str, Any]:
    """It follows the job's log; neither GPUs, volumes nor secrets."""
    resources = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"cpu": "1", "memory": "2Gi"}}
    container = {"name": "ray-job-submitter", "image": config.kubernetes.image, "resources": resources}
    return {"spec": {"restartPolicy": "Never", "containers": [container]}}


class _Plain(yaml.SafeDumper):
    """Writes what occurs twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# Texts that are numbers to YAML 1.2 and Kubernetes, and none to YAML 1.1: 12e4, 0o17. With this they are quoted.
_NUMBER = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$|0o[0-7]+$")
_Plain.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))

_TITLE = "# {name}\n# Rendered by moerl launch --kuberay, for kubectl create -f FILE.\n"
