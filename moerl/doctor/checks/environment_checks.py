"""Checks of a node's environments: versions of the trainer's and of the engines', and whether the two fit each other."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from packaging.version import Version

from moerl.doctor.checks.expected import Expectations
from moerl.doctor.checks.findings import Finding, bad, fail, ok, skipped
from moerl.doctor.checks.node_facts import NodeFacts
from moerl.doctor.checks.versions import TRANSFORMER_ENGINE, is_supported, supported
from moerl.hardware.hardware_tools import Absent, present

_TOGETHER = {
    "torch": "they share GPU memory by handles that PyTorch writes and reads; equal versions are what is tested",
    "CUDA": "one driver must run both, and what was built for the one loads no library of the other",
    "NCCL": "it refuses a communicator of ranks with different versions, and weights.transport=nccl makes one",
}
"""Packages of which trainer and engine should have the same version -> why."""


def environment_checks(facts: NodeFacts, expected: Expectations) -> Iterator[Finding]:
    yield from _trainer(facts, expected)
    for engine, versions in facts.engines.items():
        yield _engine(engine, versions)
        if present(facts.gpus) and not isinstance(versions, Absent):
            yield from _beside(engine, versions, facts, expected)


def _trainer(facts: NodeFacts, expected: Expectations) -> Iterator[Finding]:
    for name, version in facts.versions.items():
        wanted = supported().get(name, "")
        if not isinstance(version, Absent):
            yield _version(name, version, f"pip install '{name}{wanted}'")
        elif name == TRANSFORMER_ENGINE and expected.reference_te:
            yield skipped(name, f"{version.reason}; its PyTorch reference was asked for (train.reference_te, placement.device)")
        elif name in (TRANSFORMER_ENGINE, "CUDA", "NCCL"):
            yield (
                fail(name, version.reason, wanted, "make gpu")
                if present(facts.gpus)
                else skipped(name, f"{version.reason}; needed on GPUs")
            )
        else:
            yield fail(name, version.reason, wanted, f"pip install '{name}{wanted}'")


def _version(name: str, version: str, fix: str) -> Finding:
    wanted = supported().get(name, "")
    return ok(name, version, wanted) if is_supported(name, version) else fail(name, version, wanted, fix)


def _engine(engine: str, versions: Mapping[str, str] | Absent) -> Finding:
    fix = f"make engines ENGINES={engine}"
    if isinstance(versions, Absent):
        return fail(engine, versions.reason, "an environment of its own", fix)
    if engine not in versions:
        return fail(engine, "not in its environment", supported().get(engine, ""), fix)
    others = ", ".join(f"{name} {version}" for name, version in versions.items() if name != engine)
    checked = _version(engine, versions[engine], fix)
    return replace(checked, found=f"{checked.found} ({others})")


def _beside(engine: str, versions: Mapping[str, str], facts: NodeFacts, expected: Expectations) -> Iterator[Finding]:
    """Differences between the trainer and an engine, each with its reason; NCCL fails where a push joins the two by it."""
    for name, reason in _TOGETHER.items():
        check, own, theirs = f"{name} of {engine}", facts.versions.get(name), versions.get(name)
        if own is None or theirs is None or isinstance(own, Absent):
            yield skipped(check, f"not known {'there' if theirs is None else 'of the trainer'}")
        elif Version(own).public == Version(theirs).public:
            yield ok(check, theirs, f"{own}, the trainer's")
        else:
            fix = f"make gpu ENGINES={engine}; make engines ENGINES={engine}  # their locks have the same"
            yield bad(check, f"{theirs}: {reason}", f"{own}, the trainer's", fix, fails=name == "NCCL" and expected.joins_by_nccl)
