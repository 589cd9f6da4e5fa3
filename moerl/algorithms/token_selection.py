"""Losses of a token that pick tokens from the whole mini-batch: the same on every rank, whatever its micro-batches are.

Of equal values the earlier tokens are picked first.
"""

import torch
from torch import Tensor

from moerl.algorithms.columns import TokenColumns, TokenLoss
from moerl.algorithms.token_losses import ppo_clip
from moerl.config.schema.loss_config import M2PO, ClipCov, KLCov


def statistics(config: ClipCov | KLCov | M2PO, columns: TokenColumns) -> Tensor:
    """[k, T]"""
    if isinstance(config, M2PO):
        return columns.log_ratio_T().detach()[None] ** 2
    return torch.stack([columns.logp_T.detach(), columns.advantage_T])


def select(config: ClipCov | KLCov | M2PO, statistics_kN: Tensor) -> Tensor:
    """bool [N]"""
    if isinstance(config, M2PO):
        return largest_until(statistics_kN[0], mean=config.tau)
    return highest(covariances(*statistics_kN), share=config.share)


def selected_loss(config: ClipCov | KLCov | M2PO, columns: TokenColumns) -> TokenLoss:
    assert columns.selected_T is not None, "nothing was selected before"
    selected_T = columns.selected_T
    told = {"selected": selected_T.to(columns.logp_T.dtype)}
    if isinstance(config, ClipCov):
        clipped = ppo_clip(config, columns)
        told |= {name: torch.where(selected_T, 0.0, values_T) for name, values_T in clipped.metrics.items()}
        return TokenLoss(loss_T=torch.where(selected_T, 0.0, clipped.loss_T), clipped_T=clipped.clipped_T | selected_T, metrics=told)
    log_ratio_T = columns.log_ratio_T()
    plain_T = -columns.advantage_T * columns.ratio_T()
    if isinstance(config, KLCov):
        penalty_T = torch.where(selected_T, config.coefficient * log_ratio_T.abs(), 0.0)
        return TokenLoss(loss_T=plain_T + penalty_T, clipped_T=torch.zeros_like(selected_T), metrics=told)
    return TokenLoss(loss_T=torch.where(selected_T, 0.0, plain_T), clipped_T=selected_T, metrics=told)


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
