"""A diagnosis for people and for programs: a table, the commands that mend what failed, JSON."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from moerl.doctor.checks.bandwidth_checks import Bandwidth
from moerl.doctor.checks.findings import Finding, Verdict
from moerl.doctor.head import Diagnosis

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
