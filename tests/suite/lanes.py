"""The lanes of the tests, each stated once: tests/project/test_citations.py holds the Makefile, .ci/run and docs/testing.md to them."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Tests that run together, in one environment."""

    name: str
    marker: str = ""
    """pytest's -m; empty: every test of the paths."""
    paths: tuple[str, ...] = ("tests",)
    """Empty: the lane runs no tests."""
    target: str
    """Of the Makefile."""
    in_ci: bool
    """Whether .ci/run runs it."""
    is_part: bool = False
    """Of all its tests, one of sixteen groups: what others run whole. No claim rests on it."""

    def takes(self, file: str, markers: Set[str]) -> bool:
        """file: its path from the repository's root."""
        is_below = any(file == path or file.startswith(f"{path}/") for path in self.paths)
        return is_below and (not self.marker or bool(eval(self.marker, {"__builtins__": {}}, _Marked(markers))))


class _Marked(dict[str, Any]):
    """For an expression of -m, which Python reads alike: every name is a marker that the test has or has not."""

    def __init__(self, markers: Set[str]) -> None:
        self._markers = markers

    def __missing__(self, name: str) -> bool:
        return name in self._markers


_PLAIN = "not engine and not slurm and not gpu and not real and not wheels"

LANES = (
    Lane(name="lint", paths=(), target="lint", in_ci=True),
    Lane(name="docs", paths=(), target="docs", in_ci=True),
    Lane(name="test", marker=_PLAIN, target="test", in_ci=True),
    Lane(
        name="bridges",
        paths=(
            "tests/models/test_megatron_bridge.py",
            "tests/models/test_opened_families.py",
            "tests/models/test_registries.py",
            "tests/convert/test_convert_bridge.py",
            "tests/weights/test_digest.py",
        ),
        target="test-bridges",
        in_ci=True,
    ),
    Lane(name="wheels", marker="wheels", paths=("tests/wheels",), target="test-wheels", in_ci=True),
    Lane(name="real", marker="real", paths=("tests/real",), target="test-real", in_ci=True),
    Lane(name="engines", marker="engine", paths=("tests/rollout", "tests/run"), target="test-engines", in_ci=True),
    Lane(name="slurm", marker="slurm", paths=("tests/slurm",), target="test-slurm", in_ci=True),
    Lane(name="py312", marker=_PLAIN, target="test-py312", in_ci=True, is_part=True),
    Lane(name="gpu", marker="gpu", paths=("tests/gpu",), target="test-gpu", in_ci=False),
)
