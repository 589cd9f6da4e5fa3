"""Runs the command-line tools that know the hardware. They are found on PATH; what is not there is said, never assumed."""

import shutil
import subprocess
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_SECONDS = 60.0
"""nvidia-smi takes up to 20 s on a node of 8 GPUs without the persistence daemon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Absent:
    """Fact that could not be found out, and why."""

    reason: str
    is_fault: bool = False
    """The tool is there and failed; otherwise there is only nothing to ask."""


def present(what: tuple[T, ...] | Absent) -> tuple[T, ...]:
    """Nothing where it could not be found out."""
    return () if isinstance(what, Absent) else what


def run_tool(name: str, *args: str, seconds: float | None = None) -> str | Absent:
    """Its standard output. `seconds`: less than the usual time."""
    limit = _SECONDS if seconds is None else seconds
    path = shutil.which(name)
    if path is None:
        return Absent(reason=f"{name} is not on PATH")
    try:
        done = subprocess.run([path, *args], capture_output=True, text=True, errors="replace", timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return Absent(reason=f"{name} did not end within {limit:g} s", is_fault=True)
    except OSError as error:
        return Absent(reason=f"{name} cannot be run: {error}", is_fault=True)
    if done.returncode == 0:
        return done.stdout
    said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return Absent(reason=f"{name} ended with code {done.returncode}: {said[0] if said else 'it said nothing'}", is_fault=True)
