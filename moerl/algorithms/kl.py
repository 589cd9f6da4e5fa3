"""Estimates of KL(policy || other) of a token."""

import torch
from torch import Tensor

from moerl.algorithms.kl_on_driver import EXPONENT_LIMIT, K3_LIMIT
from moerl.config.schema.algorithm_config import KLEstimator


def kl_k3(logp_T: Tensor, other_logp_T: Tensor) -> Tensor:
    """exp(-d) + d - 1, d = logp - other (http://joschu.net/blog/kl-approx.html), with d clamped to +-20 and the value to at most 10."""
    d_T = (logp_T - other_logp_T).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    # expm1: near d = 0 the value is d^2 / 2, which exp(-d) - 1 would lose to rounding.
    return (torch.expm1(-d_T) + d_T).clamp(-K3_LIMIT, K3_LIMIT)


def kl_estimate(estimator: KLEstimator, logp_T: Tensor, other_logp_T: Tensor, ratio_T: Tensor) -> Tensor:
    """Estimate of a token with its gradient. `ratio_T`: policy / old policy, of `unbiased`."""
    if estimator == "unbiased":
        return kl_k3(logp_T, other_logp_T) * ratio_T
    if estimator.endswith("+"):
        value_T = _plain(estimator[:-1], logp_T, other_logp_T)
        gradient_T = _plain("k2", logp_T, other_logp_T)
        return gradient_T - gradient_T.detach() + value_T.detach()
    return _plain(estimator, logp_T, other_logp_T)


def _plain(estimator: str, logp_T: Tensor, other_logp_T: Tensor) -> Tensor:
    d_T = logp_T - other_logp_T
    match estimator:
        case "k1":
            return d_T
        case "k2":
            return d_T**2 / 2
        case "abs":
            return d_T.abs()
    return kl_k3(logp_T, other_logp_T)
