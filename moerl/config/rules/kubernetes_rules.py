"""Rules of `kubernetes`, by themselves and between them and the rest of a run's settings."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from moerl.config.rules.facts import Facts
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import NOT_SET, Problem, problem

MAX_NAME = 47
"""Characters of a RayJob's name: KubeRay makes names of services from it (MaxRayJobNameLength, KubeRay 1.4)."""


def job_name(run: str) -> str:
    """A run's name as Kubernetes takes one (RFC 1035: letters, digits and hyphens)."""
    return re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")


def kubernetes_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Faults of the settings, whoever starts the run."""
    kubernetes = config.kubernetes
    for index, volume in enumerate(kubernetes.volumes):
        if not PurePosixPath(volume.path).is_absolute() or PurePosixPath(volume.path) == PurePosixPath("/"):
            path, reason = f"kubernetes.volumes.{index}.path", "a pod has no directory of submission"
            yield problem(path, volume.path, "must be absolute, below /", reason, "path: /data")
    for name, source in kubernetes.secrets.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            reason = "containers get it as a variable"
            yield problem(f"kubernetes.secrets.{name}", "(not shown)", "is not the name of a variable", reason, "WANDB_API_KEY: wandb/key")
        elif not re.fullmatch(r"[a-z0-9.-]+/[A-Za-z0-9._-]+", source):
            # It may be the secret itself.
            rule, reason = "must be SECRET/KEY", "the manifest is readable: it says where the value is, not what"
            fix = f"kubectl create secret generic NAME --from-literal=KEY=..., and {name}: NAME/KEY"
            yield problem(f"kubernetes.secrets.{name}", "(not shown)", rule, reason, fix)


def launch_problems(config: RunConfig, config_dir: str | None) -> Iterator[Problem]:
    """Faults that keep this run from being a RayJob."""
    kubernetes, name = config.kubernetes, job_name(config.name)
    if kubernetes.image is None:
        yield problem("kubernetes.image", None, "must be given", "pods are made from it", "kubernetes.image=REGISTRY/moerl:TAG")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > MAX_NAME:
        rule = f"must begin with a letter and have at most {MAX_NAME} characters, as {name!r}"
        yield problem("name", config.name, rule, "the job and what KubeRay makes for it are named after it", "a shorter name=")
    if config.placement.gpus_per_node is None and config.placement.nodes > 1:
        return  # reported by the rules of placement
    for path, value, must_write in _places(config, config_dir):
        holders = [volume for volume in kubernetes.volumes if PurePosixPath(value).is_relative_to(volume.path)]
        usable = [volume for volume in holders if not (must_write and volume.read_only)]
        if not usable:
            rule = "must be on a volume that pods can write" if must_write else "must be on a volume of the pods"
            shown = ", ".join(volume.path for volume in kubernetes.volumes) if kubernetes.volumes else NOT_SET
            reason = f"what a pod writes elsewhere ends with it; kubernetes.volumes: {shown}"
            yield problem(path, value, rule, reason, "kubernetes.volumes=[{claim: CLAIM, path: /data}], and a path below /data")


def _places(config: RunConfig, config_dir: str | None) -> Iterator[tuple[str, str, bool]]:
    """(setting, path, whether pods write there)"""
    yield "output_dir", config.output_dir, True
    if config.model.path is not None:
        yield "model.path", config.model.path, False
    if config.data.kind == "files":
        yield from ((f"data.files.{index}", str(file), False) for index, file in enumerate(config.data.files))
    if config.placement.topology is not None:
        yield "placement.topology", config.placement.topology, False
    if config.rollout.tls is not None:
        yield from ((f"rollout.tls.{name}", file, False) for name, file in vars(config.rollout.tls).items())
    if config_dir is not None:
        yield "--config-dir", config_dir, False
