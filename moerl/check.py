"""Loading with the checks of every package: what `moerl train` starts from and `moerl check` prints. Imports no torch."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from moerl.config.compose import compose
from moerl.config.derive.companion_models import without_companions
from moerl.config.derive.scratch_config import scratch_config
from moerl.config.load import build, checked
from moerl.config.resume import model_differences, resume_differences
from moerl.config.rules.engine_rules import unserved
from moerl.config.rules.facts import Facts, facts_of
from moerl.config.rules.server_layout_rules import start_problems
from moerl.config.schema.run_config import RunConfig
from moerl.config.validate import validate
from moerl.evaluation.request import Evaluation, evaluation_of, kind_of, out_problems, source_of, source_problems, with_model
from moerl.planner.verdict import gpu_problems
from moerl.rewards.reward_rules import check_reward
from moerl.rollout.datasets.load_dataset import check_data
from moerl.train.checkpoint.checkpoint_check import check, read_manifest
from moerl.train.checkpoint.checkpoint_dirs import newest
from moerl.types.errors import CheckpointError, ConfigError, Problem, can_be, problem
from moerl.types.json_text import read_object


def load_checked(overrides: Sequence[str], config_dir: Path | None = None, *, starts: bool = False) -> RunConfig:
    """Raises ConfigError with every problem, see `moerl.config.load.checked`; then CheckpointError if the newest checkpoint is damaged.

    `starts`: the run is about to begin, and needs what a check alone can do without.
    """
    return checked_run(compose(overrides, config_dir), starts=starts)


def checked_run(plain: Mapping[str, Any], *, starts: bool = False) -> RunConfig:
    """The run of composed settings, raising as `load_checked`."""
    checks = (gpu_problems, _data_and_reward, _continued_run, *([cannot_start, _unwritable] if starts else []))
    config = checked(plain, checks)
    directory = newest(_checkpoints(config))
    if directory is not None:
        check(directory)
    return config


def load_evaluation(overrides: Sequence[str], config_dir: Path | None = None, *, checkpoint: Path | None, out: Path | None) -> Evaluation:
    """Evaluation that `moerl eval` makes. Raises as `load_checked`. `checkpoint`: None: the newest of the run."""
    return checked_evaluation(compose(overrides, config_dir), checkpoint=checkpoint, out=out)


def checked_evaluation(plain: Mapping[str, Any], *, checkpoint: Path | None, out: Path | None) -> Evaluation:
    """An evaluation with composed settings, raising as `load_checked`."""
    config = without_companions(build(plain))
    source = source_of(config, checkpoint)
    problems = list(source_problems(config, checkpoint))
    if source is not None and not problems:
        config = with_model(config, source)
    facts = facts_of(config.model)
    problems += [*validate(config, facts), *_data_and_reward(config, facts)]
    if source is not None and kind_of(source) == "run":
        problems += _trained_otherwise(config, source)
    problems += cannot_start(config, facts)
    problems += out_problems(out) if out is not None else ()
    if problems:
        raise ConfigError(problems)
    assert source is not None
    if kind_of(source) == "run":
        check(source)
    return evaluation_of(config, source, out)


def _trained_otherwise(config: RunConfig, checkpoint: Path) -> Iterator[Problem]:
    """Differences that keep the weights of a run's checkpoint from being those of the model."""
    model = _model_config(config)
    if model is not None:
        with suppress(CheckpointError):  # a damaged manifest is reported by the check of the whole checkpoint
            yield from model_differences(read_manifest(checkpoint).model, model[1], checkpoint=str(checkpoint), config_file=model[0])


def _data_and_reward(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    if not _is_recipe_alone(config):
        yield from check_data(config.data)
    yield from check_reward(config.reward)
    for name, dataset in config.eval.datasets.items() if config.eval is not None else ():
        found = [*check_data(dataset.data), *(check_reward(dataset.reward) if dataset.reward is not None else ())]
        yield from (_of_dataset(f"eval.datasets.{name}.", each) for each in found)


_SETTING = re.compile(r"(?<![\w./])(?=(?:data\.(?:args|chat_template|files|size|task)|reward\.terms)\b)")
"""Where a setting of a data set or a reward begins in a message; what follows a slash is a file."""


def _of_dataset(section: str, found: Problem) -> Problem:
    """`found`: of an evaluated data set, in the words of the run's own."""
    rule, reason, fix = (_SETTING.sub(section, text) for text in (found.rule, found.reason, found.fix))
    return replace(found, path=f"{section}{found.path}", rule=rule, reason=reason, fix=fix)


def _is_recipe_alone(config: RunConfig) -> bool:
    """Whether neither the model nor the rows are here: a recipe is checked before anything is downloaded."""
    return config.model.is_only_named and config.data.kind == "files"


def cannot_start(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Settings that can be checked and planned, and that `train` and `launch` refuse."""
    if config.model.is_only_named:
        reason = f"model.published={config.model.published} says what the model is, for checks; its weights are not part of moerl"
        yield problem("model.path", None, "must be given to start", reason, "model.path=DIRECTORY of the downloaded checkpoint")
        yield from unserved(config.rollout, facts.shape)  # with a path, a rule of every check
    if _is_recipe_alone(config):
        yield from check_data(config.data)
    yield from start_problems(config, facts)


def _unwritable(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """A directory of the run that cannot be made or written."""
    if not can_be(config.run_dir):
        return  # reported by validation
    there = next(each for each in (config.run_dir.absolute(), *config.run_dir.absolute().parents) if each.exists())
    fix = "another output_dir="
    if not there.is_dir():
        yield problem("output_dir", config.output_dir, "must be a directory", f"{there} is none", fix)
    elif not os.access(there, os.W_OK | os.X_OK):
        yield problem("output_dir", config.output_dir, "must be a directory that can be written", f"{there} cannot be", fix)
    for folder in (config.run_dir / name for name in ("checkpoints", "logs", "samples")):
        if os.path.lexists(folder) and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            rule, reason = "must be a directory that can be written", "the run's checkpoints, logs and samples each have theirs"
            yield problem("output_dir", str(folder), rule, reason, f"remove or mend it, or {fix}")


def _continued_run(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    """Settings that keep a run that exists from being continued with these settings."""
    if not all(can_be(Path(place)) for place in (config.run_dir, config.model.path) if place is not None):
        return  # reported by validation
    saved = config.run_dir / "config.yaml"
    if saved.exists():
        yield from resume_differences(saved.read_bytes(), config, path=str(saved))
    directory = newest(_checkpoints(config))
    if directory is not None:
        yield from _trained_otherwise(config, directory)


def _checkpoints(config: RunConfig) -> Path:
    return config.run_dir / "checkpoints"


def _model_config(config: RunConfig) -> tuple[str, dict[str, Any]] | None:
    """(its name for people, the config.json that the run will read); None where validation says why there is none."""
    directory = Path(config.model.path) if config.model.path is not None else config.run_dir / "model"
    file = directory / "config.json"
    if file.exists():
        with suppress(ValueError, OSError):
            return str(file), read_object(file)
        return None
    scratch = config.model.scratch
    return None if scratch is None else ("model.scratch", scratch_config(scratch, config.model.max_context))
