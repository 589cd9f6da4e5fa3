"""KL without torch: the formulas of its estimators, which ranks take too, its values in rewards, and the coefficient that follows one."""

from collections.abc import Callable
from typing import Any

import numpy as np

from moerl.config.schema.algorithm_config import KLEstimator

EXPONENT_LIMIT = 20.0
"""Every exponent is clamped to +-20, so that one absurd log-prob gives a large number instead of inf."""
K3_LIMIT = 10.0


def plain_estimate(estimator: str, d: Any, expm1: Callable[[Any], Any]) -> Any:
    """Values of k1, k2, abs or k3 (http://joschu.net/blog/kl-approx.html) for d = logp - other, of numpy or torch, whose `expm1` it is. k3
    is of d clamped to +-20, and at most 10."""
    match estimator:
        case "k1":
            return d
        case "k2":
            return d**2 / 2
        case "abs":
            return abs(d)
    d = d.clip(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    # expm1: near d = 0 the value is d^2 / 2, which exp(-d) - 1 would lose to rounding.
    return (expm1(-d) + d).clip(-K3_LIMIT, K3_LIMIT)


def kl_values(estimator: KLEstimator, logp_N: np.ndarray, other_logp_N: np.ndarray) -> np.ndarray:
    """Values [N] of moerl.algorithms.kl.kl_estimate, which has gradients too, where policy and old policy are the same."""
    values_N: np.ndarray = plain_estimate(estimator.rstrip("+"), logp_N - other_logp_N, np.expm1)
    return values_N


def adapted(coefficient: float, *, kl: float, target: float, horizon: int, num_samples: int) -> float:
    """Coefficient after a step of `num_samples` whose mean KL was `kl`: times 1 + clip(kl / target - 1, +-0.2) * samples / horizon
    (arXiv:1909.08593, section 2.2). It turns its sign where a step has five times the horizon's samples, which a rule refuses."""
    return coefficient * (1 + float(np.clip(kl / target - 1, -0.2, 0.2)) * num_samples / horizon)
