"""KL as the driver has it, without torch: in rewards, and the coefficient that follows one."""

import numpy as np

from moerl.config.schema.algorithm_config import KLEstimator

EXPONENT_LIMIT = 20.0
"""Every exponent is clamped to +-20, so that one absurd log-prob gives a large number instead of inf."""
K3_LIMIT = 10.0


def kl_values(estimator: KLEstimator, logp_N: np.ndarray, other_logp_N: np.ndarray) -> np.ndarray:
    """Values [N] of moerl.algorithms.kl.kl_estimate, which has gradients too, where policy and old policy are the same."""
    d_N = logp_N - other_logp_N
    match estimator.rstrip("+"):
        case "k1":
            return d_N
        case "k2":
            return d_N**2 / 2
        case "abs":
            return np.abs(d_N)
    d_N = np.clip(d_N, -EXPONENT_LIMIT, EXPONENT_LIMIT)
    return np.clip(np.expm1(-d_N) + d_N, -K3_LIMIT, K3_LIMIT)


def adapted(coefficient: float, *, kl: float, target: float, horizon: int, num_samples: int) -> float:
    """Coefficient after a step of `num_samples` whose mean KL was `kl`: times 1 + clip(kl / target - 1, +-0.2) * samples / horizon
    (arXiv:1909.08593, section 2.2). It turns its sign where a step has five times the horizon's samples, which a rule refuses."""
    return coefficient * (1 + float(np.clip(kl / target - 1, -0.2, 0.2)) * num_samples / horizon)
