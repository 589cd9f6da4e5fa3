"""Estimates of KL(policy || other) of a token."""

import torch
from torch import Tensor

from moerl.algorithms.kl_formulas import plain_estimate
from moerl.config.schema.algorithm_config import KLEstimator


def kl_k3(logp_T: Tensor, other_logp_T: Tensor) -> Tensor:
    return plain_estimate("k3", logp_T - other_logp_T, torch.expm1)


def kl_estimate(estimator: KLEstimator, logp_T: Tensor, other_logp_T: Tensor, ratio_T: Tensor) -> Tensor:
    """Estimate of a token with its gradient. `ratio_T`: policy / old policy, of `unbiased`."""
    if estimator == "unbiased":
        return kl_k3(logp_T, other_logp_T) * ratio_T
    d_T = logp_T - other_logp_T
    value_T: Tensor = plain_estimate(estimator.rstrip("+"), d_T, torch.expm1)
    if not estimator.endswith("+"):
        return value_T
    gradient_T = d_T**2 / 2
    return gradient_T - gradient_T.detach() + value_T.detach()
