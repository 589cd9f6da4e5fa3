"""The files of an evaluation beside its samples (evaluator.py): results.json, and of which checkpoint and settings they are. Its table."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moerl.evaluation.estimates import Z_95, Estimate, Result
from moerl.evaluation.request import IDENTITY

RESULTS = "results.json"


def write_results(directory: Path, results: Sequence[Result], *, version: int, checkpoint: str | None = None) -> dict[str, float]:
    """Writes results.json; the metrics of all data sets."""
    plain = {"version": version, "checkpoint": checkpoint, "datasets": {result.name: result.plain() for result in results}}
    _write(directory / RESULTS, plain)
    return {name: value for result in results for name, value in result.metrics().items()}


discard = partial(shutil.rmtree, ignore_errors=True)
"""Removal of a directory, and of what an earlier evaluation left there."""


def keep_samples_of(directory: Path, identity: Mapping[str, Any]) -> None:
    """Samples that are in `directory` stay only if they are of the same checkpoint and settings, and the evaluation has not ended."""
    file, results = directory / IDENTITY, directory / RESULTS
    if results.exists() or not file.exists() or json.loads(file.read_text()) != identity:
        discard(directory / "samples")
        _write(file, identity)
    results.unlink(missing_ok=True)


def print_table(results: Sequence[Result]) -> None:
    """One row per data set, means with the half width of their 95 % interval. On standard output; in full where that is not a terminal."""
    ks = sorted({k for result in results for k in result.passes})
    shown = Table()
    shown.add_column("data set")
    for title in ("prompts", "samples", "reward", *(f"pass@{k}" for k in ks), "length", "truncated", "errors"):
        shown.add_column(title, justify="right")
    for result in results:
        passes = [_shown(result.passes[k]) if k in result.passes else "-" for k in ks]
        rest = (f"{result.length_mean:.1f}", f"{result.truncated:.1%}", str(result.errors))
        shown.add_row(result.name, str(result.num_prompts), str(result.samples), _shown(result.reward), *passes, *rest)
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(shown)


def _shown(estimate: Estimate) -> str:
    half = "" if estimate.standard_error is None else f" ± {Z_95 * estimate.standard_error:.3f}"
    return f"{estimate.mean:.3f}{half}"


def _write(path: Path, plain: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(plain, indent=1))
    os.replace(temporary, path)
