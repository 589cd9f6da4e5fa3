"""Findings of the doctor: one finding per node and check."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from moerl.hardware.hardware_tools import Absent

Verdict = Literal["ok", "warn", "fail", "skipped"]

ALL_NODES = "all"
"""Node of a finding that is about the nodes together."""


@dataclass(frozen=True, slots=True)
class Finding:
    node: str = field(default=ALL_NODES, kw_only=True)
    check: str
    found: str
    """Finding of a check that was skipped: why."""
    expected: str = ""
    verdict: Verdict = field(kw_only=True)
    fix: str = ""
    """A command that mends it, or a comment in a shell's form; empty where nothing is to be done."""


ok, skipped = partial(Finding, verdict="ok"), partial(Finding, verdict="skipped")
warn, fail = partial(Finding, verdict="warn"), partial(Finding, verdict="fail")


def bad(check: str, found: str, expected: str, fix: str, *, fails: bool, node: str = ALL_NODES) -> Finding:
    """A warning unless it `fails`."""
    return Finding(check, found, expected, verdict="fail" if fails else "warn", fix=fix, node=node)


def absent(check: str, what: Absent, fix: str = "") -> Finding:
    """A tool that is missing leaves the check out; one that failed is a fault of the node."""
    return fail(check, what.reason, "an answer", fix) if what.is_fault else skipped(check, what.reason)
