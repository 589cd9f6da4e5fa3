"""Where the metrics of a step go: metrics.jsonl, TensorBoard, wandb.

On resume at step k the first step written is k + 1; `truncate_after(k)` makes a destination forget what an earlier process
wrote past it, so that no step appears twice.
"""

import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from moerl.observe.records import replace_records, step_records, to_line
from moerl.types.errors import ConfigError, Problem

_NUMBERS = count()
"""Numbers of the event files of this process."""


class MetricsWriter(Protocol):
    def truncate_after(self, step: int) -> None: ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, *, succeeded: bool) -> None: ...


class JsonlWriter:
    """One line per step, `{"step": 3, "reward/mean": 0.25, ...}`, in the file as soon as `write` returns."""

    def __init__(self, path: Path):
        self.path = path
        self._reopen(step_records(path) if path.exists() else [])

    def truncate_after(self, step: int) -> None:
        self._file.close()
        self._reopen([record for record in step_records(self.path) if record["step"] <= step])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(to_line({"step": step, **metrics}))
        self._file.flush()

    def close(self, *, succeeded: bool) -> None:
        self._file.close()

    def _reopen(self, records: list[dict[str, Any]]) -> None:
        replace_records(self.path, records)
        self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")


class TensorBoardWriter:
    """Scalars in an event file of its own per process, written without torch, and without the thread of TensorBoard's own writer, whose
    failures are told twice."""

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._records = RecordWriter((directory / name).open("ab"))
        self._add(file_version="brain.Event:2")

    def truncate_after(self, step: int) -> None:
        # TensorBoard drops what earlier files of the directory hold from the step of a START event on.
        self._add(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step=step, summary=Summary(value=values))

    def close(self, *, succeeded: bool) -> None:
        self._records.close()

    def _add(self, **fields: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()


class WandbWriter:
    """A wandb run whose id is kept in the run's directory, so that resuming goes on in the same one.

    Charts use `step` as their axis. wandb cannot take back what an earlier process logged past a resumed step; both stay.
    """

    def __init__(self, run_dir: Path, *, mode: Literal["offline", "online"], project: str, name: str, config: Mapping[str, Any]):
        try:
            import wandb
        except ImportError as error:
            reason, fix = "the package wandb is not installed", 'pip install "moerl[wandb]", or observe.wandb=off'
            raise ConfigError([_wandb_problem(mode, reason, fix)]) from error
        self._wandb: Any = wandb
        try:
            self._run = self._wandb.init(
                project=project,
                name=name,
                id=wandb_id(run_dir, name),
                resume="allow",
                mode=mode,
                dir=run_dir,
                config=dict(config),
                settings=self._wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
            )
        except self._wandb.errors.Error as error:
            self._wandb.teardown()
            raise ConfigError([_wandb_problem(mode, f"wandb could not start: {error}", "wandb login, or observe.wandb=offline")]) from error
        self._run.define_metric("*", step_metric="step")

    def truncate_after(self, step: int) -> None:
        """Nothing can be removed from a wandb run."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self, *, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)
        # Ends wandb's service process, which otherwise lives as long as this one.
        self._wandb.teardown()


def wandb_id(run_dir: Path, name: str) -> str:
    """The id of the run in `run_dir`, made once: people who run the same recipe share its name, and may share a wandb project.

    wandb ids may not hold / \\ # ? % : and have at most 128 characters.
    """
    path = run_dir / "wandb_id.txt"
    if path.exists() and (kept := path.read_text().strip()):
        return kept
    made = f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)[:119]}-{secrets.token_hex(4)}"
    run_dir.mkdir(parents=True, exist_ok=True)
    path.write_text(made + "\n")
    return made


def _wandb_problem(mode: str, reason: str, fix: str) -> Problem:
    return Problem(path="observe.wandb", value=mode, rule="needs a wandb that starts", reason=reason, fix=fix)
