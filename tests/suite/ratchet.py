"""Which tests and shared fixtures may be dear: tests/costly.toml names each with the reason."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FILE = "tests/costly.toml"


@dataclass
class Ratchet:
    """Two limits in CPU seconds, as a busy machine makes the same test up to twice as dear: between them an unnamed one is warned of."""

    named_above: float
    refused_above: float
    tests: dict[str, str] = field(default_factory=dict)
    fixtures: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> "Ratchet":
        """An entry is the id of a test or fixture; without parameters in brackets it stands for all of them."""
        content = tomllib.loads((root / FILE).read_text())
        limits = content.pop("limits")
        return cls(limits["named_above_cpu_seconds"], limits["refused_above_cpu_seconds"], **content)

    def judge(self, seconds: Mapping[str, float], kind: str = "tests") -> "Verdict":
        reasons: dict[str, str] = getattr(self, kind)
        verdict = Verdict()
        for name, spent in seconds.items():
            if spent <= self.named_above or name in reasons or name.partition("[")[0] in reasons:
                continue
            line = f"{name}: {spent:.0f} CPU seconds and no reason in {FILE} [{kind}]"
            if spent > self.refused_above:
                verdict.failures.append(f"{line} (limit {self.refused_above:g}): make it cheaper, or name it there with the reason")
            else:
                verdict.warnings.append(f"{line} (to be named above {self.named_above:g}, refused above {self.refused_above:g})")
        for name in reasons:
            spent = [s for test, s in seconds.items() if name in (test, test.partition("[")[0])]
            if spent and max(spent) < self.named_above / 2:
                verdict.warnings.append(f"{name}: {max(spent):.0f} CPU seconds: its entry in {FILE} [{kind}] can go")
        return verdict


@dataclass
class Verdict:
    """Lines for people: what fails the run, and what does not."""

    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __add__(self, other: "Verdict") -> "Verdict":
        return Verdict(self.failures + other.failures, self.warnings + other.warnings)


def gone(name: str) -> str:
    return f"{name}: there is no such test: remove its entry from {FILE} [tests]"
