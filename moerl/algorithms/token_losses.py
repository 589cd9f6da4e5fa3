"""Losses of a token in torch, float32 or float64: no masks and no sums over a batch.

Forms and conventions: docs/algorithms.md.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moerl.algorithms.columns import TokenColumns, TokenLoss
from moerl.algorithms.kl_on_driver import EXPONENT_LIMIT
from moerl.algorithms.trust_regions import dppo, dppo_prime, ipo
from moerl.config.schema.loss_config import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    IPO,
    SAPO,
    ClipCov,
    DPPOPrime,
    PPOClip,
    Reinforce,
)


def plain_loss(config: Any, columns: TokenColumns) -> TokenLoss:
    return _LOSSES[type(config)](config, columns)


def ppo_clip(config: PPOClip | GSPO | ClipCov, columns: TokenColumns) -> TokenLoss:
    return clipped_surrogate(config, columns.ratio_T(), columns.advantage_T)


def clipped_surrogate(config: PPOClip | GSPO | ClipCov, ratio_T: Tensor, advantage_T: Tensor) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); if A < 0 and dual_clip = c: min(-A c, that)."""
    plain_T = -advantage_T * ratio_T
    bounded_T = -advantage_T * _bounded(ratio_T, config)
    loss_T, clipped_T = torch.maximum(plain_T, bounded_T), bounded_T > plain_T
    if config.dual_clip is None:
        return TokenLoss(loss_T=loss_T, clipped_T=clipped_T)
    ceiling_T = -advantage_T * config.dual_clip
    over_T = (advantage_T < 0) & (loss_T > ceiling_T)
    return TokenLoss(loss_T=torch.where(over_T, ceiling_T, loss_T), clipped_T=clipped_T, metrics={"dual_clipped": over_T.to(loss_T.dtype)})


def _bounded(ratio_T: Tensor, config: Any) -> Tensor:
    low, high = config.clip_low, config.clip_high
    if low is None and high is None:
        return ratio_T
    return ratio_T.clamp(None if low is None else 1 - low, None if high is None else 1 + high)


def _gspo(config: GSPO, columns: TokenColumns) -> TokenLoss:
    # Straight through: the value of the sequence's ratio, and of each token the gradient of its own log-prob.
    log_ratio_T = columns.means_T(columns.log_ratio_T().detach()) + (columns.logp_T - columns.logp_T.detach())
    ratio_T = log_ratio_T.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
    advantage_T = columns.advantage_T if config.kind == "gspo_token" else columns.means_T(columns.advantage_T)
    return clipped_surrogate(config, ratio_T, advantage_T)


def _cispo(config: CISPO, columns: TokenColumns) -> TokenLoss:
    ratio_T = columns.ratio_T().detach()
    weight_T = _bounded(ratio_T, config)
    return TokenLoss(loss_T=-weight_T * columns.advantage_T * columns.logp_T, clipped_T=weight_T != ratio_T)


def _sapo(config: SAPO, columns: TokenColumns) -> TokenLoss:
    ratio_T, advantage_T = columns.ratio_T(), columns.advantage_T
    positive_T, negative_T = (torch.full_like(ratio_T, tau) for tau in (config.tau_positive, config.tau_negative))
    tau_T = torch.where(advantage_T > 0, positive_T, negative_T)
    return _unbounded(-advantage_T * torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T)


def _gmpo(config: GMPO, columns: TokenColumns) -> TokenLoss:
    log_ratio_T, advantage_T = columns.log_ratio_T(), columns.advantage_T
    sign_T = torch.sign(advantage_T)
    low, high = config.clip_low, config.clip_high
    bounded_T = log_ratio_T if low is None and high is None else log_ratio_T.clamp(None if low is None else -low, high)
    kept_T = torch.minimum(sign_T * log_ratio_T, sign_T * bounded_T)
    mean_T = columns.sums_T(sign_T * kept_T) / (columns.tokens_T + 1e-8)
    ratio_T = mean_T.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
    return TokenLoss(loss_T=-columns.means_T(advantage_T) * ratio_T, clipped_T=kept_T < sign_T * log_ratio_T)


def _reinforce(config: Reinforce, columns: TokenColumns) -> TokenLoss:
    return _unbounded(-columns.advantage_T * columns.logp_T * columns.ratio_T().detach())


def _unbounded(loss_T: Tensor) -> TokenLoss:
    return TokenLoss(loss_T=loss_T, clipped_T=torch.zeros_like(loss_T, dtype=torch.bool))


_LOSSES: dict[type, Callable[[Any, TokenColumns], TokenLoss]] = {
    PPOClip: ppo_clip, GSPO: _gspo, CISPO: _cispo, SAPO: _sapo, GMPO: _gmpo, DPPO: dppo, DPPOPrime: dppo_prime, IPO: ipo,
    Reinforce: _reinforce,
}  # fmt: skip
