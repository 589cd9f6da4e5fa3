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
    if not len(values_N):
        return torch.zeros_like(values_N, dtype=torch.bool)
    number = max(int(share * len(values_N)), 1)
    return _first_of(values_N, values_N.topk(number, sorted=False).values.min(), number)


def largest_until(values_N: Tensor, *, mean: float) -> Tensor:
    """bool [N]: the largest, as few as leave a mean of at most `mean` in the rest."""
    is_large_N = values_N > mean  # no other needs to go
    large = values_N[is_large_N].sort().values
    if not len(large):
        return is_large_N
    small = values_N[~is_large_N]
    means = (small.sum() + large.cumsum(0)) / (len(small) + torch.arange(1, len(large) + 1, device=large.device))
    number = int((means > mean).sum())  # means only grow with what is kept
    return torch.zeros_like(is_large_N) if number == 0 else _first_of(values_N, large[-number], number)


def _first_of(values_N: Tensor, least: Tensor, number: int) -> Tensor:
    """bool [N]: `number` values, all above `least`, and of those that equal it the first."""
    above_N, equal_N = values_N > least, values_N == least
    return above_N | (equal_N & (equal_N.cumsum(0) <= number - above_N.sum()))
