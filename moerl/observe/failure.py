"""Cause that ended a run, for a person: who failed first, where and at what, in the last lines on the terminal and in run_dir/failure.txt.

A failure is the end of a chain of exceptions; the deepest one that knows its process names it. All others are in the file alone.
"""

import socket
import traceback
from collections.abc import Iterator
from pathlib import Path

from moerl.cluster.error_texts import headline
from moerl.train.checkpoint.checkpoint_dirs import newest, version_of
from moerl.types.errors import MoerlError, Origin

FILE = "failure.txt"


def write_failure(run_dir: Path, error: BaseException, *, phase: str | None, version: int | None, trains: bool = True) -> str:
    """Writes the file; returns the closing lines. `phase`: what the driver waited for; `version`: the last that was trained in this
    process, None if there was none. `trains`: it takes steps, as an evaluation does not."""
    origin = origin_of(error, phase)
    path = run_dir / FILE
    lines = [
        *([] if isinstance(error, MoerlError) else headline("".join(traceback.format_exception(error)))),
        f"failed: {origin.who} on node {origin.node}, in {origin.doing}" + (f", at step {_step(run_dir, version)}" if trains else ""),
        f"log: {origin.log if origin.log else run_dir / 'run.log'}",
    ]
    chain = "".join(traceback.format_exception(error))
    said = str(error).splitlines() if isinstance(error, MoerlError) else []
    whole = [*said, *lines, "", *([origin.details, ""] if origin.details else []), "== the failure as the driver saw it", chain]
    try:
        path.write_text("\n".join(whole), encoding="utf-8", errors="backslashreplace")
    except OSError as unwritten:  # a full disk, say, which may be no part of the cause
        return "\n".join([*lines, f"the failure report could not be written: {unwritten}"])
    return "\n".join([*lines, f"more: {path}"])


def origin_of(error: BaseException, phase: str | None) -> Origin:
    """Origin of the deepest failure in its chain that names its process; else the driver."""
    origins = [each.origin for each in chain_of(error) if isinstance(each, MoerlError) and each.origin is not None]
    doing = phase if phase is not None else "no phase"
    if not origins:
        return Origin(who="driver", node=socket.gethostname(), doing=doing)
    found = origins[-1]
    return found if found.doing else Origin(who=found.who, node=found.node, doing=doing, log=found.log, details=found.details)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, what caused that, and so on."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ if each.__cause__ is not None or each.__suppress_context__ else each.__context__


def _step(run_dir: Path, version: int | None) -> int:
    """The one that was not finished."""
    if version is not None:
        return version + 1
    directory = newest(run_dir / "checkpoints")
    return 1 if directory is None else version_of(directory) + 1
