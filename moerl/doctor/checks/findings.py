"""Findings of the doctor: one finding per node and check."""

from dataclasses import dataclass
from typing import Literal

from moerl.hardware.hardware_tools import Absent

Verdict = Literal["ok", "warn", "fail", "skipped"]

ALL_NODES = "all"
"""Node of a finding that is about the nodes together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    node: str
    check: str
    found: str
    """Finding of a check that was skipped: why."""
    expected: str
    verdict: Verdict
    fix: str = ""
    """A command that mends it, or a comment in a shell's form; empty where nothing is to be done."""


def ok(check: str, found: str, expected: str = "") -> Finding:
    return Finding(node=ALL_NODES, check=check, found=found, expected=expected, verdict="ok")


def warn(check: str, found: str, expected: str, fix: str = "") -> Finding:
    return Finding(node=ALL_NODES, check=check, found=found, expected=expected, verdict="warn", fix=fix)


def fail(check: str, found: str, expected: str, fix: str) -> Finding:
    return Finding(node=ALL_NODES, check=check, found=found, expected=expected, verdict="fail", fix=fix)


def skipped(check: str, why: str, expected: str = "") -> Finding:
    return Finding(node=ALL_NODES, check=check, found=why, expected=expected, verdict="skipped")


def absent(check: str, what: Absent, fix: str = "") -> Finding:
    """A tool that is missing leaves the check out; one that failed is a fault of the node."""
    return fail(check, what.reason, "an answer", fix) if what.is_fault else skipped(check, what.reason)
