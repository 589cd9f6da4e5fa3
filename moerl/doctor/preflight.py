"""The doctor as the command line and a job's start call it: finds out where it runs, examines, prints, and says whether to go on."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moerl.config.schema.run_config import RunConfig
from moerl.doctor.checks.bandwidth_checks import Bandwidth
from moerl.doctor.checks.expected import Expectations, expected_of
from moerl.doctor.checks.findings import Finding, Verdict
from moerl.doctor.head import Diagnosis, diagnose
from moerl.doctor.reach_nodes import join_slurm, on_ray, on_slurm, on_this_machine, slurm_step
from moerl.types.errors import MoerlError
from moerl.types.exit_codes import ExitCode

_STYLES: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}
_NAMES_SHOWN = 4


def table(findings: Sequence[Finding]) -> Table:
    """Rows, of which one stands for what several nodes have in common."""
    rows = Table(box=None, pad_edge=False)
    for title in ("node", "check", "found", "expected", "verdict"):
        rows.add_column(title, overflow="fold")  # a path is worth nothing without its end
    for finding in merged(findings):
        style = _STYLES[finding.verdict]
        rows.add_row(*map(Text, (finding.node, finding.check, finding.found, finding.expected)), Text(finding.verdict, style=style))
    return rows


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """One row for what several nodes have in common, in the order of the first: findings that differ in their node only, those that are ok
    with other figures too, and skipped checks with the same reason."""
    rows: dict[Finding, list[Finding]] = {}
    for finding in findings:
        key = replace(finding, node="", found="" if finding.verdict == "ok" else finding.found)
        rows.setdefault(key, []).append(finding)
    checks: dict[Finding, list[str]] = {}
    for alike in rows.values():
        row = replace(alike[0], node=_joined([one.node for one in alike]), found=_joined([one.found for one in alike]))
        checks.setdefault(replace(row, check="") if row.verdict == "skipped" else row, []).append(row.check)
    return [replace(row, check=", ".join(names)) for row, names in checks.items()]


def settings_lines(diagnosis: Diagnosis) -> list[str]:
    """The network variables of train ranks, with the reason of each; a node that gets others than the first is named."""
    lines: dict[str, list[str]] = {}
    for node in diagnosis.nodes:
        for setting in node.settings:
            what = f"{setting.name}={setting.value}" if setting.value is not None else f"{setting.name} is left as it is"
            lines.setdefault(f"{what}  # {setting.reason}", []).append(node.name)
    return [line if len(names) == len(diagnosis.nodes) else f"{_joined(names)}: {line}" for line, names in lines.items()]


def fixes(findings: Iterable[Finding]) -> list[str]:
    """Commands for what failed or gave a warning, each with the node to run it on. Nothing runs them."""
    bad = [finding for finding in findings if finding.verdict in ("fail", "warn") and finding.fix]
    return [f"# {finding.node}: {finding.check}: {finding.found}\n{finding.fix}" for finding in merged(bad)]


def as_json(diagnosis: Diagnosis, *, exit_code: int) -> str:
    return json.dumps(
        {
            "exit_code": exit_code,
            "findings": [asdict(finding) for finding in diagnosis.findings],
            "network": {node.name: [asdict(setting) for setting in node.settings] for node in diagnosis.nodes},
            "bandwidth_gb_per_second": None if diagnosis.bandwidth is None else _bandwidth(diagnosis.bandwidth, diagnosis),
        },
        indent=1,
    )


def summary(findings: Sequence[Finding]) -> str:
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in _STYLES}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def _bandwidth(bandwidth: Bandwidth, diagnosis: Diagnosis) -> dict[str, Any]:
    names = [node.name for node in diagnosis.nodes]
    return {
        "between_nodes": {f"{names[a]} - {names[b]}": speed for (a, b), speed in bandwidth.between_nodes.items()},
        "inside": {
            name: {f"{a} - {b}": speed for (a, b), speed in links.items()} for name, links in zip(names, bandwidth.inside, strict=True)
        },
        "node_all_reduce": dict(zip(names, bandwidth.node_all_reduce, strict=True)) if bandwidth.node_all_reduce else {},
        "all_reduce": bandwidth.all_reduce,
    }


def _joined(words: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(words))
    if len(distinct) <= _NAMES_SHOWN:
        return ", ".join(distinct)
    return f"{', '.join(distinct[:_NAMES_SHOWN])} and {len(distinct) - _NAMES_SHOWN} more"


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
    address = os.environ.get("RAY_ADDRESS") or None  # an empty one is none, as for a run
    slurm = slurm_step(os.environ) if address is None else None
    if slurm is not None and slurm.index > 0:
        join_slurm(slurm, expected, seconds)
        return None
    if address is not None:
        launching = on_ray(address, expected, seconds)
    else:
        launching = on_this_machine(expected, seconds) if slurm is None else on_slurm(slurm, expected, seconds)
    with launching as launched:
        return diagnose(launched, expected, seconds=seconds, measures=measures)


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
