"""Estimates that scored samples give of a model, with how sure that is. Pure.

Prompts are what is drawn at random; samples of one prompt are alike. So every figure is a mean over prompts of a value per prompt, and its
standard error is that of this mean (arXiv:2411.00640): more samples of the same prompts make the values better, not the prompts more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Z_95 = 1.96
"""Standard errors to either side of a mean that a normal distribution's middle 95 % take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of one sample."""

    reward: float
    """0 if it could not be scored."""
    passed: bool
    length: int
    """Tokens."""
    truncated: bool
    error: str | None
    """Why it could not be scored."""
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    mean: float
    standard_error: float | None
    """None: of one prompt there is none."""

    @classmethod
    def over(cls, values: Sequence[float]) -> "Estimate":
        """`values`: one of each prompt."""
        error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
        return cls(mean=float(np.mean(values)), standard_error=error)

    @property
    def interval(self) -> tuple[float, float] | None:
        """In which the mean over all prompts of this kind is, 95 of 100 times; for some tens of prompts or more."""
        return None if self.standard_error is None else (self.mean - Z_95 * self.standard_error, self.mean + Z_95 * self.standard_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one data set."""

    name: str
    num_prompts: int
    samples: int
    """Samples of each prompt."""
    reward: Estimate
    passes: Mapping[int, Estimate]
    """k -> pass@k."""
    length_mean: float
    truncated: float
    """Share of the samples that end at the response limit."""
    errors: int
    """Samples that could not be scored: they have reward 0 and do not pass."""
    parts: Mapping[str, float]
    """Mean of each reward term, over the samples that have it."""

    def metrics(self) -> dict[str, float]:
        """Under the names of a run's metrics."""
        found = {
            "reward": self.reward.mean,
            **{f"pass@{k}": estimate.mean for k, estimate in self.passes.items()},
            **{f"pass@{k}_error": e.standard_error for k, e in self.passes.items() if e.standard_error is not None},
            "length": self.length_mean,
            "truncated": self.truncated,
            "errors": float(self.errors),
        }
        return {f"eval/{self.name}/{name}": value for name, value in found.items()}

    def plain(self) -> dict[str, Any]:
        """Fields for JSON."""
        return {
            "num_prompts": self.num_prompts,
            "samples": self.samples,
            "reward": _plain(self.reward),
            **{f"pass@{k}": _plain(estimate) for k, estimate in self.passes.items()},
            "length_mean": self.length_mean,
            "truncated": self.truncated,
            "errors": self.errors,
            "parts": dict(self.parts),
        }


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The chance that one of k samples passes, if `num_passed` of `num_samples` did: 1 - C(n - c, k) / C(n, k), arXiv:2107.03374."""
    if num_samples - num_passed < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(num_samples - num_passed + 1, num_samples + 1)))


def result_of(name: str, prompts: Sequence[Sequence[Outcome]], *, pass_at: Sequence[int]) -> Result:
    """`prompts`: the same number of samples of each, at least one."""
    outcomes = [outcome for samples in prompts for outcome in samples]
    counts = [(len(samples), sum(outcome.passed for outcome in samples)) for samples in prompts]
    names = dict.fromkeys(part for outcome in outcomes for part in outcome.parts)
    return Result(
        name=name,
        num_prompts=len(prompts),
        samples=len(prompts[0]),
        reward=Estimate.over([float(np.mean([outcome.reward for outcome in samples])) for samples in prompts]),
        passes={k: Estimate.over([pass_at_k(n, c, k) for n, c in counts]) for k in pass_at},
        length_mean=float(np.mean([outcome.length for outcome in outcomes])),
        truncated=float(np.mean([outcome.truncated for outcome in outcomes])),
        errors=sum(outcome.error is not None for outcome in outcomes),
        parts={part: float(np.mean([outcome.parts[part] for outcome in outcomes if part in outcome.parts])) for part in names},
    )


def _plain(estimate: Estimate) -> dict[str, Any]:
    return {"mean": estimate.mean, "standard_error": estimate.standard_error, "interval_95": estimate.interval}
