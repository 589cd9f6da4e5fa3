"""Tokens that an objective picks from a whole mini-batch: the same on every rank, whatever its micro-batches are.

Of equal values the earlier tokens are picked first.
"""

import torch
from torch import Tensor


def covariances(logp_N: Tensor, advantage_N: Tensor) -> Tensor:
    """[N]: each token's part of the covariance of log-prob and advantage."""
    return (logp_N - logp_N.mean()) * (advantage_N - advantage_N.mean())


def highest(values_N: Tensor, *, share: float) -> Tensor:
    """bool [N]: the highest, share * N of them rounded down, but at least one."""
    chosen_N = torch.zeros_like(values_N, dtype=torch.bool)
    if len(values_N):
        chosen_N[values_N.argsort(descending=True, stable=True)[: max(int(share * len(values_N)), 1)]] = True
    return chosen_N


def largest_until(values_N: Tensor, *, mean: float) -> Tensor:
    """bool [N]: the largest, as few as leave a mean of at most `mean` in the rest."""
    order = values_N.argsort(descending=True, stable=True)
    rest = values_N[order].flip(0).cumsum(0).flip(0)  # of each and of all after it
    counts = torch.arange(len(values_N), 0, -1, device=values_N.device)
    is_over = rest / counts > mean
    chosen_N = torch.zeros_like(values_N, dtype=torch.bool)
    chosen_N[order[: int(is_over.sum())]] = True  # means of a sorted rest only fall
    return chosen_N
