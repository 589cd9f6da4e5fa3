"""The doctor as the command line and a job's start call it: finds out where it runs, examines, prints, and says whether to go on."""

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console

from moerl.config.schema.run_config import RunConfig
from moerl.doctor.checks.expected import Expectations, expected_of
from moerl.doctor.head import Diagnosis, diagnose, open_store
from moerl.doctor.output import as_json, fixes, settings_lines, summary, table
from moerl.doctor.reach_nodes import Launched, Slurm, join_slurm, on_ray, on_slurm, on_this_machine, slurm_step
from moerl.types.errors import MoerlError
from moerl.types.exit_codes import ExitCode

SECONDS = 180.0
"""Seconds for the nodes to come, of which importing torch from a shared file system takes most, and again for the measurements."""


_LOG_WIDTH = 140


class PreflightError(MoerlError, RuntimeError):
    """The nodes cannot carry a run; names every failure with node and fix."""


def preflight(config: RunConfig, *, nodes: int | None = None, gpus_per_node: int | None = None, seconds: float = SECONDS) -> Diagnosis:
    """Before a run starts: PreflightError names every failure, ConfigError what cannot be examined at all.

    Call it on the driver: with RAY_ADDRESS, in the first task of a step with one task per node, or alone on a machine.
    """
    diagnosis = examine_nodes(expected_of(config, nodes=nodes, gpus_per_node=gpus_per_node), seconds=seconds, measures=True)
    assert diagnosis is not None, "tasks of a step other than the first run `moerl doctor`"
    failed = [finding for finding in diagnosis.findings if finding.verdict == "fail"]
    if failed:
        raise PreflightError("\n".join(f"{f.node}: {f.check}: {f.found}; expected {f.expected}; fix: {f.fix}" for f in failed))
    return diagnosis


def examine_nodes(expected: Expectations, *, seconds: float, measures: bool) -> Diagnosis | None:
    """None in a Slurm step's other tasks, which have done what the first one asked.

    A job that has brought up its Ray is examined through it: RAY_ADDRESS counts more than the step around it.
    """
    address = os.environ.get("RAY_ADDRESS")
    slurm = slurm_step(os.environ) if address is None else None
    if slurm is not None and slurm.index > 0:
        join_slurm(slurm, expected, seconds)
        return None
    store = open_store(seconds)
    with _launched(address, slurm, store.port, expected, seconds) as launched:
        return diagnose(store, launched, expected, seconds=seconds, measures=measures)


def report(diagnosis: Diagnosis, *, json_file: Path | None, with_fixes: bool) -> int:
    """Prints it, writes `json_file`, and returns the exit code."""
    console = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
    exit_code = ExitCode.DONE if diagnosis.is_healthy else ExitCode.FAILED
    console.print(table(diagnosis.findings))
    for line in ("", *settings_lines(diagnosis), summary(diagnosis.findings)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if with_fixes:
        for fix in fixes(diagnosis.findings):
            console.print("\n" + fix, markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(as_json(diagnosis, exit_code=exit_code))
    return exit_code


def _launched(
    address: str | None, slurm: Slurm | None, port: int, expected: Expectations, seconds: float
) -> AbstractContextManager[Launched]:
    if address is not None:
        return on_ray(address, port, expected, seconds)
    return on_this_machine(port, expected, seconds) if slurm is None else on_slurm(slurm, port, expected, seconds)
