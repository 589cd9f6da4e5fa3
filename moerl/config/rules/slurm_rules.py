"""Rules of `slurm`."""

import re
from collections.abc import Iterator, Mapping
from typing import get_args

from moerl.config.rules.facts import Facts
from moerl.config.schema.deadlines import Phase
from moerl.config.schema.run_config import RunConfig
from moerl.config.schema.slurm_config import SlurmConfig
from moerl.types.errors import Problem, problem


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
