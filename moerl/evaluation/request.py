"""Which checkpoint `moerl eval` evaluates, in which directory, and what is wrong with that. Imports no torch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moerl.config.derive.eval_settings import reward_of
from moerl.config.load import to_plain
from moerl.config.rules.checkpoint_files import conversion_of
from moerl.config.schema.custom_part import split_path
from moerl.config.schema.run_config import RunConfig
from moerl.rewards.reward_rules import source_files
from moerl.train.checkpoint.checkpoint_check import check
from moerl.train.checkpoint.checkpoint_dirs import MANIFEST, complete, newest
from moerl.types.errors import NOT_SET, Problem, problem

IDENTITY = "evaluation.json"
"""File that says of which checkpoint and settings the samples beside it are."""
_SAMPLED_BY = ("model", "reward", "rollout", "eval", "deterministic", "seed")
"""Sections that decide what is sampled, and how it is scored."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    config: RunConfig
    """Settings of the run, but with a directory of the evaluation's own, and without what only training needs."""
    source: Path
    """The checkpoint."""
    checkpoint: Path | None
    """The same, if it is a run's; None: a Hugging Face folder, which is `config.model.path`."""

    def identity(self) -> dict[str, Any]:
        """Equal for evaluations that make the same samples. Raises CheckpointError if the checkpoint has gone since it was found."""
        if self.checkpoint is not None:
            check(self.checkpoint)
        plain = to_plain(self.config)
        model = self.config.model.path  # its tokenizer, its config.json and its end of a response decide about samples as weights do
        files = [] if model is None else sorted(file for file in Path(model).iterdir() if file.is_file())
        return {
            "checkpoint": str(self.source.resolve()),
            "files": [_state(file) for file in (*files, *([] if self.checkpoint is None else [self.source / MANIFEST]))],
            "functions": [_state(file) for file in _function_files(self.config)],
            "settings": {name: plain[name] for name in _SAMPLED_BY},
            "dtype": plain["train"]["dtype"],
        }


def _state(file: Path) -> list[Any]:
    """Another one for a file that was written again."""
    return [file.name, file.stat().st_size, file.stat().st_mtime_ns]


def _function_files(config: RunConfig) -> list[Path]:
    """Files of functions that score, and those beside them that they import."""
    assert config.eval is not None
    terms = (term for dataset in config.eval.datasets.values() for term in reward_of(config, dataset).terms.values())
    sources = {split_path(term.path)[0] for term in terms if term.path is not None}
    return sorted(set().union(*map(source_files, sources)))


def kind_of(directory: Path) -> Literal["run", "hf"] | None:
    """Kind of what lies there: a run's checkpoint, a Hugging Face folder, or neither."""
    # By the name that it has there, or that a link to it leads to.
    if directory.is_dir() and any(path in complete(path.parent) for path in (directory.absolute(), directory.resolve())):
        return "run"
    return "hf" if (directory / "config.json").is_file() and not (directory / "checkpoints").is_dir() else None


def source_of(config: RunConfig, checkpoint: Path | None) -> Path | None:
    """Checkpoint to be evaluated: `checkpoint`, or the newest of the run; None if it has none."""
    return newest(config.run_dir / "checkpoints") if checkpoint is None else checkpoint


def source_problems(config: RunConfig, checkpoint: Path | None) -> Iterator[Problem]:
    path, source = "--checkpoint", source_of(config, checkpoint)
    if config.eval is None:
        reason, fix = "it says on what the checkpoint is evaluated", "eval=NAME of configs/eval, or eval.datasets.NAME.data=..."
        yield problem("eval", NOT_SET, "must be given", reason, fix)
    if source is None:
        reason = f"{config.run_dir / 'checkpoints'} holds no checkpoint of this run"
        yield problem(path, NOT_SET, "must be given", reason, f"{path}=RUN/checkpoints/step-N, or {path}=DIRECTORY of a Hugging Face model")
    elif not source.is_dir():
        fix = f"{path}=RUN/checkpoints/step-N, or {path}=DIRECTORY of a Hugging Face model"
        yield problem(path, str(source), "is not a directory", f"looked in {source.absolute()}", fix)
    elif kind_of(source) is None:
        there = newest(source / "checkpoints") or newest(source)
        conversion = conversion_of(source, f"{path}=FOLDER")
        other = conversion if conversion is not None else f"{path}=RUN/checkpoints/step-N, or a folder with config.json and safetensors"
        fix = f"{path}={there}" if there is not None else other
        yield problem(path, str(source), "holds no checkpoint", "it is neither step-N of a run nor a Hugging Face folder", fix)


def out_problems(out: Path) -> Iterator[Problem]:
    """Faults that keep samples and results from being written there: an evaluation replaces what is there, which must be one's own."""
    if out.exists() and not out.is_dir():
        yield problem("--out", str(out), "must be a directory", "samples and results are written there", "another --out=")
    elif out.is_dir() and not (out / IDENTITY).is_file():
        others = [name for name in ("checkpoints", "metrics.jsonl", "samples") if os.path.lexists(out / name)]
        if others:
            reason = f"it has {', '.join(others)}, which are not an evaluation's and would be lost"
            yield problem(
                "--out", str(out), "must be new, or of an evaluation", reason, f"--out={out / 'evaluation'}, or another directory"
            )


def with_model(config: RunConfig, source: Path) -> RunConfig:
    """With the model that is in a Hugging Face folder."""
    return replace(config, model=replace(config.model, path=str(source), scratch=None)) if kind_of(source) == "hf" else config


def evaluation_of(config: RunConfig, source: Path, out: Path | None) -> Evaluation:
    """`config`: checked, with the model of `source`."""
    directory = config.run_dir / "eval" / f"checkpoint-{source.resolve().name}" if out is None else out
    return Evaluation(
        config=replace(
            config,
            output_dir=str(directory.parent),
            name=directory.name,
            train=replace(
                config.train,
                router_replay="off",
                mtp_loss=0.0,
                overlap_grad_reduce=False,
                overlap_param_gather=False,
                # The buffers of gradients leave before the weights come.
                offload="optimizer" if config.train.offload == "none" else config.train.offload,
            ),
            observe=replace(config.observe, terminal=False, tensorboard=False, wandb="off", dump_every=0),
        ),
        source=source,
        checkpoint=source if kind_of(source) == "run" else None,
    )
