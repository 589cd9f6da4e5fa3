"""The functions of `import moerl`, in a Python program or a notebook: what the commands do, with their settings and results as objects.

A run has the one of its `RunConfig`, which is a frozen dataclass: `dataclasses.replace` changes it. Whatever is handed in is checked anew,
as a user's commands are, and what is wrong is a ConfigError with every problem. Nothing here imports torch before a run starts.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.check import checked_evaluation, checked_run
from moerl.config.algorithm_settings import algorithm
from moerl.config.compose import compose
from moerl.config.load import checked, to_plain
from moerl.config.schema.algorithm_config import AlgorithmConfig
from moerl.config.schema.run_config import RunConfig
from moerl.evaluation.estimates import Result
from moerl.planner.memory_plan import MemoryPlan, memory_plan
from moerl.planner.push_plan import PushPlan, plan_push
from moerl.types.errors import CheckpointError, ConfigError, MoerlError, Problem, RunStopped, problem

if TYPE_CHECKING:
    from moerl.train.loss.algorithm_loss import AlgorithmResult, TokenArrays, algorithm_loss

__all__ = [
    "AlgorithmConfig", "AlgorithmResult", "CheckpointError", "ConfigError", "MemoryPlan", "MoerlError", "Problem", "PushPlan", "Result",
    "RunConfig", "RunStopped", "TokenArrays", "algorithm", "algorithm_loss", "check", "evaluate", "load", "memory", "plan", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in ("AlgorithmResult", "TokenArrays", "algorithm_loss"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moerl.train.loss import algorithm_loss  # imports torch

    return getattr(algorithm_loss, name)


def load(recipe: str, *overrides: str, config_dir: str | Path | None = None) -> RunConfig:
    """The run of a recipe, as `moerl check recipe=RECIPE OVERRIDES...` reads it: load("grpo-tiny-moe-1n2g-sync", "num_steps=20").

    `config_dir`: a directory with recipe/NAME.yaml files of your own. Raises ConfigError with every setting that is wrong; what lies on
    disks is looked at by `check`, and by `train` itself.
    """
    return checked(_composed(recipe, overrides, config_dir))


def check(run: RunConfig | str, *overrides: str, config_dir: str | Path | None = None) -> list[Problem]:
    """Everything for which `train` would refuse the run; empty if it would start. `run`: a configuration, or a recipe as for `load`."""
    try:
        checked_run(_composed(run, overrides, config_dir), starts=True)
    except ConfigError as error:
        return error.problems
    except CheckpointError as error:
        told, _, faults = str(error).partition("\n")
        damaged, _, fix = told.partition("; ")
        return [problem("checkpoints", damaged, "must be whole", faults, fix)]
    return []


def train(config: RunConfig, *, ends_at: float | None = None) -> Path:
    """Train to the end, or from where the run's newest checkpoint left off; the path of its report, RUN/report.html.

    `ends_at`: when the machine is taken away, in seconds since 1970. Blocks, also in a notebook, and can be interrupted there. Raises
    MoerlError, which is RunStopped for a run that was asked to end and saved. Leaves no process.
    """
    ready = checked_run(_plain(config), starts=True)

    from moerl.observe.report import report_finished

    if (report := report_finished(ready)) is not None:
        return report

    from moerl.cluster.forks.fork_server import forking

    with forking(apart=True):
        from moerl import run  # takes seconds

        return run.train(ready, ends_at=ends_at)


def evaluate(config: RunConfig, *, checkpoint: str | Path | None = None, out: str | Path | None = None) -> list[Result]:
    """Evaluate a checkpoint on the data sets of eval.*; a result for each of them.

    `checkpoint`: RUN/checkpoints/step-N or a Hugging Face folder; None: the run's newest. `out`: the directory for samples and
    results.json; None: RUN/eval/checkpoint-NAME. An evaluation that was stopped goes on. Raises as `train`.
    """
    ready = checked_evaluation(_plain(config), checkpoint=_path(checkpoint), out=_path(out))

    from moerl.cluster.forks.fork_server import forking

    with forking(apart=True):
        from moerl import run

        return run.evaluate(ready)[1]


def plan(
    config: RunConfig, *, servers: int | None = None, gpus_per_server: int | None = None, gpus_per_node: int | None = None,
    card_gbit: float | None = None, bucket_bytes: int | None = None,
) -> PushPlan:  # fmt: skip
    """Bytes that a push of the run's weights moves, and how long it takes at least; printed, it is what `moerl plan` prints.

    What is not None stands instead of the configuration's. `card_gbit`: 1e9 bits by GPU, per second; None: its card's, what
    placement.gpu says, or 400.
    """
    return plan_push(
        checked(_plain(config)), servers=servers, gpus_per_server=gpus_per_server, gpus_per_node=gpus_per_node, card_gbit=card_gbit,
        bucket_bytes=bucket_bytes,
    )  # fmt: skip


def memory(config: RunConfig) -> MemoryPlan:
    """Memory that the run's ranks, servers and nodes need, by phase and kind; printed, it is what `moerl plan --only=memory` prints."""
    return memory_plan(checked(_plain(config)))


def _composed(run: RunConfig | str, overrides: tuple[str, ...], config_dir: str | Path | None) -> dict[str, object]:
    if isinstance(run, str):
        return compose([f"recipe={run.removeprefix('recipe=')}", *overrides], _path(config_dir))
    if overrides or config_dir is not None:
        raise TypeError("overrides and config_dir go with the name of a recipe; dataclasses.replace changes a configuration")
    return to_plain(run)


def _plain(config: RunConfig | str) -> dict[str, object]:
    if isinstance(config, str):  # as check takes it
        raise TypeError(f"{config!r} names a recipe and is no configuration: moerl.load({config!r}) makes one of it")
    return to_plain(config)


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)
