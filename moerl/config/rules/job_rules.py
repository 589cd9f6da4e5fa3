"""Rules of jobs: `slurm` and `kubernetes`, by themselves and between them and the rest of a run's settings."""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import get_args

from moerl.config.derive.companion_models import companion_models
from moerl.config.rules.facts import Facts
from moerl.config.schema.custom_part import CustomPart, split_path
from moerl.config.schema.deadlines import Phase
from moerl.config.schema.job_config import SlurmConfig
from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import NOT_SET, Problem, problem


def slurm_problems(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    yield from _own_problems(config.slurm, config.placement.nodes)
    waits = [phase for phase in get_args(Phase) if phase != "eval" or (config.eval is not None and config.eval.every > 0)]
    deadlines = {f"deadlines.{phase}_seconds": config.deadlines.of(phase) for phase in waits}
    yield from time_problems(config.slurm, {"slurm.start_seconds": config.slurm.start_seconds, **deadlines})


def _own_problems(slurm: SlurmConfig, num_nodes: int) -> Iterator[Problem]:
    if slurm.segment is not None and num_nodes % slurm.segment:
        rule = f"must divide placement.nodes={num_nodes}"
        yield problem("slurm.segment", slurm.segment, rule, "a job consists of whole segments", "slurm.segment of a divisor")
    yield from _text_problems(slurm)
    yield from _environment_problems(slurm)
    for index, mount in enumerate(slurm.container.mounts if slurm.container is not None else ()):
        if not re.fullmatch(r"/[^:,]*:/[^:,]*(:[^:,]+)?", mount):
            reason = "nodes and the container have no common working directory"
            yield problem(f"slurm.container.mounts.{index}", mount, "must be /HOST:/CONTAINER[:OPTIONS]", reason, "/data:/data:ro")


def time_problems(slurm: SlurmConfig, deadlines: Mapping[str, float]) -> Iterator[Problem]:
    """Waits that do not fit into the time limit. `deadlines`: setting -> seconds, of a run's waits."""
    if slurm.time is None or slurm.time == "UNLIMITED" or not re.fullmatch(_WORDS["time"], slurm.time):
        return
    seconds = limit_seconds(slurm.time)
    if seconds is None:
        reason = "sbatch takes minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS or UNLIMITED"
        yield problem("slurm.time", slurm.time, "is no time limit", reason, "slurm.time=04:00:00")
    elif 0 < seconds <= slurm.end_seconds:
        reason = f"Slurm asks the job to save slurm.end_seconds={slurm.end_seconds} before the limit: as soon as it starts"
        yield problem(
            "slurm.time", slurm.time, f"must be more than {slurm.end_seconds} seconds", reason, "a longer time, or less end_seconds"
        )
    elif seconds > 0:
        for path, deadline in deadlines.items():
            if deadline >= seconds:
                reason = "the job would end before the deadline, and a hang with it, without a word about who did not arrive"
                rule, fix = (
                    f"must be less than slurm.time={slurm.time}, {seconds} seconds",
                    f"{path}={seconds // 4}, or a longer slurm.time",
                )
                yield problem(path, deadline, rule, reason, fix)


def limit_seconds(time: str) -> int | None:
    """Seconds of a limit as sbatch takes it; 0 for none; None if it is no such text."""
    found = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", time, re.ASCII)
    if found is None:
        return None
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:  # minutes, and seconds
        numbers = [0, *numbers]
    hours, minutes, rest = [*numbers, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def size_problems(slurm: SlurmConfig, num_nodes: int, placed_per_node: int | None, needed: int) -> Iterator[Problem]:
    """Faults of a run that needs so many GPUs, if Slurm is to start it. `placed_per_node`: placement.gpus_per_node."""
    per_node = slurm.gpus_per_node
    if placed_per_node is not None and 0 < per_node < placed_per_node:
        rule, reason = f"must be at least placement.gpus_per_node={placed_per_node}", "the run uses as many of every node"
        yield problem("slurm.gpus_per_node", per_node, rule, reason, f"slurm.gpus_per_node={placed_per_node}, or a smaller placement")
        return
    if per_node and num_nodes * per_node < needed:
        rule = f"must be at least {-(-needed // per_node)}"
        reason = f"the run needs {needed} GPUs, and {num_nodes} nodes of slurm.gpus_per_node={per_node} have {num_nodes * per_node}"
        fix = f"placement.nodes={-(-needed // per_node)} with placement.gpus_per_node={per_node}, or slurm.gpus_per_node=0 on CPU"
        yield problem("placement.nodes", num_nodes, rule, reason, fix)


_WORDS = {
    "partition": r"[\w.,+-]+", "account": r"[\w.@+-]+", "qos": r"[\w.+-]+", "exclude": r"[\w.,\[\]-]+",
    "time": r"[\d:-]+|UNLIMITED", "constraint": r"[\w.&|*\[\]()+-]+",
}  # fmt: skip
"""In an #SBATCH line a space or a quote would end the value."""


def _text_problems(slurm: SlurmConfig) -> Iterator[Problem]:
    for name, pattern in _WORDS.items():
        value = getattr(slurm, name)
        if value is not None and not re.fullmatch(pattern, value):
            reason = "it becomes part of a line of the script, where other characters have a meaning"
            yield problem(f"slurm.{name}", value, "cannot be written into a job script", reason, "the value as sbatch takes it")


_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)


def _environment_problems(slurm: SlurmConfig) -> Iterator[Problem]:
    for name in slurm.environment:
        path = f"slurm.environment.{name}"
        if not re.fullmatch(_NAME, name):
            yield problem(path, name, "is not a name of a variable", "the script exports it", "letters, digits and underscores")
        elif _SECRET.search(name):
            # Its value must not be repeated here either.
            reason = "the script and its copies are readable, and the name is that of a secret"
            yield problem(path, "(not shown)", "must not have its value in the script", reason, f"slurm.pass_environment=[{name}]")
    for index, name in enumerate(slurm.pass_environment):
        if not re.fullmatch(_NAME, name):
            reason = "sbatch takes its value from the environment of the submission"
            yield problem(f"slurm.pass_environment.{index}", name, "is not a name of a variable", reason, "the name alone, without =VALUE")


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
        if not re.fullmatch(_NAME, name):
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
        fix = "kubernetes.image=REGISTRY/moerl:TAG, of containers/Dockerfile"
        yield problem("kubernetes.image", None, "must be given", "pods are made from it, and none is published", fix)
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
    for path, value in _functions(config):
        if not PurePosixPath(split_path(value)[0]).is_absolute():
            reason, fix = "a pod has no directory of submission", "the path of the file in the image, or on a volume of the pods"
            yield problem(path, value, "must be absolute", reason, fix)


def _functions(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(setting, FILE.py:NAME) of functions and classes of the user's that are files."""
    rewards = {"reward": config.reward}
    for name, dataset in ({} if config.eval is None else config.eval.datasets).items():
        if dataset.reward is not None:
            rewards[f"eval.datasets.{name}.reward"] = dataset.reward
    found = [(f"{section}.terms.{name}.path", term.path) for section, each in rewards.items() for name, term in each.terms.items()]
    algorithm = config.algorithm
    corrections = [(f"corrections.{index}", each) for index, each in enumerate(algorithm.corrections)]
    parts = [("advantage", algorithm.advantage), ("objective", algorithm.objective), *corrections]
    found += [(f"algorithm.{name}.path", part.path) for name, part in parts if isinstance(part, CustomPart)]
    yield from ((setting, path) for setting, path in found if path is not None and split_path(path)[0].endswith(".py"))


def _places(config: RunConfig, config_dir: str | None) -> Iterator[tuple[str, str, bool]]:
    """(setting, path, whether pods write there)"""
    yield "output_dir", config.output_dir, True
    if config.model.path is not None:
        yield "model.path", config.model.path, False
    yield from ((f"{model.section}.path", model.path, False) for model in companion_models(config) if model.path is not None)
    evaluated = {} if config.eval is None else config.eval.datasets
    for section, data in {"data": config.data, **{f"eval.datasets.{name}.data": each.data for name, each in evaluated.items()}}.items():
        if data.kind == "files":
            yield from ((f"{section}.files.{index}", str(file), False) for index, file in enumerate(data.files))
    if config.placement.topology is not None:
        yield "placement.topology", config.placement.topology, False
    if config.rollout.tls is not None:
        yield from ((f"rollout.tls.{name}", file, False) for name, file in vars(config.rollout.tls).items())
    if config_dir is not None:
        yield "--config-dir", config_dir, False
