"""Errors that moerl raises for people, and the `Problem`s that some of them hold. All picklable, one tree; neither numpy nor torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from moerl.types.exit_codes import ExitCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a configuration, said so that it can be mended."""

    path: str
    value: object
    rule: str
    reason: str
    fix: str

    def __str__(self) -> str:
        text = f"{self.path} = {self.value!r}: {self.rule}\n    why: {self.reason}\n    fix: {self.fix}"
        return text.encode(errors="backslashreplace").decode()  # a name may be no UTF-8, which no terminal takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The process in which a failure began."""

    who: str
    """"rank 1 of 8", "rollout server 127.0.0.1:4000", "reward worker", "driver"."""
    node: str
    doing: str
    """Its phase, or the call that failed."""
    log: str = ""
    """The file to open; empty if it has none."""
    details: str = ""
    """Text for the failure report alone: the whole traceback, and what failed after it."""


class MoerlError(Exception):
    """Base of everything moerl raises for people; all of it can be pickled."""

    origin: Origin | None = None
    """None: this process, where it was raised."""
    exit_code: int = ExitCode.FAILED
    """Exit code of a run that ends with it."""
    asked_to_end: int | None = None
    """Exit code with which the run had been asked to end before it failed with this."""

    def began_in(self, origin: Origin) -> Self:
        """Sets `origin`; for `raise Error(...).began_in(...)`."""
        self.origin = origin
        return self


class _ProblemsError(MoerlError, ValueError):
    """Holds every problem found, not only the first."""

    exit_code = ExitCode.UNUSABLE
    where: str

    def __init__(self, problems: "list[Problem]"):
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        count = len(self.problems)
        return f"{count} problem{'s' if count > 1 else ''} {self.where}\n" + "\n".join(f"* {p}" for p in self.problems)


class ConfigError(_ProblemsError):
    """The configuration cannot run."""

    where = "in the configuration"


class CommandError(_ProblemsError):
    """A command line that cannot be read."""

    where = "with the command"


class ConvertError(_ProblemsError):
    """Checkpoints that cannot be converted, inspected or compared."""

    where = "with the checkpoint"


class DataError(MoerlError, ValueError):
    """A dataset row cannot be used; names the file and the row."""

    exit_code = ExitCode.UNUSABLE


class TrainError(MoerlError, RuntimeError):
    """A train rank failed; carries that rank's traceback."""


class OutOfDeviceMemory(TrainError):
    """A rank's GPU is full."""

    held: Mapping[str, int] = {}
    """Bytes on it by kind, as far as they are known."""
    call: str = ""
    """The rank's verb."""
    model: str = "policy"
    """Name of the model that it was for."""
    stage: int = 0
    """Its pipeline stage."""


class HangError(MoerlError, RuntimeError):
    """A phase missed its deadline. Names the processes that did not arrive, and the report with the stacks of all."""

    names: tuple[str, ...] = ()
    """Names of the processes."""


class ResidencyError(TrainError):
    """A call that the trainer's state does not allow (it sleeps, or another call is running), or a move between states of shared GPUs that
    do not follow each other."""


class EngineError(MoerlError, RuntimeError):
    """A rollout server could not start, died, or refused a request."""


class EngineUnavailable(EngineError):
    """The server is gone, or may not serve now; another one can take the request, or the same one later."""


class EngineUnsound(EngineError):
    """A rollout server answered what cannot be the answer to its request: it, not the request, is at fault."""


class StoreError(MoerlError, RuntimeError):
    """Ray's object store cannot hold, or has lost, what samples consist of."""


class WeightError(MoerlError, RuntimeError):
    """Trainer and engine do not hold the same weights."""

    names: tuple[str, ...] = ()
    """Names of the servers that a comparison found at fault."""


class CheckpointError(MoerlError, RuntimeError):
    """A checkpoint is missing, damaged, or of another model."""


class DynamicSamplingError(MoerlError, RuntimeError):
    """Dynamic sampling dropped every group it was allowed to draw; explains the reward distribution."""


class GuardError(MoerlError, AssertionError):
    """A run-time check of the trainer against the engine failed."""


class RunStopped(MoerlError):
    """A run that was asked to end did, with its last step saved: nothing failed."""

    def __init__(self, reason: str, exit_code: int):
        super().__init__(f"stopped: {reason}; the same command continues the run")
        self.exit_code = exit_code


class ReportError(MoerlError, RuntimeError):
    """A run directory holds no metrics, or damaged ones."""


class _NotSet:
    def __repr__(self) -> str:
        return "(not set)"

    def __reduce__(self) -> str:
        return "NOT_SET"


NOT_SET = _NotSet()


def problem(path: str, value: object, rule: str, reason: str, fix: str) -> Problem:
    return Problem(path=path, value=value, rule=rule, reason=reason, fix=fix)


def can_be(path: Path) -> bool:
    """Whether there could be such a file: names of more than 255 bytes have none, and Python's own questions end with OSError."""
    try:
        path.exists()
    except OSError:
        return False
    return True
