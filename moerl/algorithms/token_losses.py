"""Losses of a token in torch, float32 or float64: no masks and no sums over a batch.

Forms and conventions: docs/algorithms.md.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moerl.algorithms.columns import TokenColumns, TokenLoss
from moerl.algorithms.kl_formulas import EXPONENT_LIMIT
from moerl.config.schema.loss_config import CISPO, DPPO, GMPO, GSPO, IPO, SAPO, ClipCov, DPPOPrime, PPOClip, Reinforce


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


# -- trust regions of probabilities: the policy's and the server's, in place of a ratio's clip -----------------


def _dppo(config: DPPO, columns: TokenColumns) -> TokenLoss:
    outside_T = _far_by_kl(config, columns) if config.kind == "dppo_kl" else _far_by_tv(config, columns)
    weight_T = columns.ratio_T().detach().clamp(max=config.ratio_cap)
    loss_T = torch.where(outside_T, 0.0, -columns.advantage_T * weight_T * columns.logp_T)
    return TokenLoss(loss_T=loss_T, clipped_T=outside_T)


def _dppo_prime(config: DPPOPrime, columns: TokenColumns) -> TokenLoss:
    outside_T = _far_by_tv(config, columns)
    inside_T = torch.where(outside_T, 0.0, -columns.advantage_T * columns.ratio_T())
    return TokenLoss(loss_T=inside_T + config.drift_penalty * columns.log_ratio_T() ** 2, clipped_T=outside_T)


def _ipo(config: IPO, columns: TokenColumns) -> TokenLoss:
    p_T, mu_T = _probabilities(columns)
    outside_T = (p_T - mu_T).abs() > config.divergence
    loss_T = torch.where(outside_T, 0.0, -columns.advantage_T * columns.ratio_T())
    return TokenLoss(loss_T=loss_T, clipped_T=outside_T)


def _probabilities(columns: TokenColumns) -> tuple[Tensor, Tensor]:
    """Probabilities of the sampled token, by the policy as it is and by the server."""
    return columns.logp_T.detach().exp(), columns.rollout_logp_T.exp()


def _far_by_tv(config: DPPO | DPPOPrime, columns: TokenColumns) -> Tensor:
    p_T, mu_T = _probabilities(columns)
    return torch.where(columns.advantage_T > 0, p_T - mu_T > config.high, p_T - mu_T < -config.low)


def _far_by_kl(config: DPPO, columns: TokenColumns) -> Tensor:
    p_T, mu_T = _probabilities(columns)
    log_p_T, log_mu_T = columns.logp_T.detach(), columns.rollout_logp_T
    other_p_T, other_mu_T = -torch.expm1(log_p_T), -torch.expm1(log_mu_T)
    rest_T = torch.special.xlogy(other_mu_T, other_mu_T / other_p_T.clamp(min=1e-10))
    divergence_T = mu_T * (log_mu_T - log_p_T) + rest_T
    is_up_T = columns.advantage_T > 0
    away_T = torch.where(is_up_T, p_T > mu_T, p_T < mu_T)
    return away_T & torch.where(is_up_T, divergence_T > config.high, divergence_T > config.low)


_LOSSES: dict[type, Callable[[Any, TokenColumns], TokenLoss]] = {
    PPOClip: ppo_clip, GSPO: _gspo, CISPO: _cispo, SAPO: _sapo, GMPO: _gmpo, DPPO: _dppo, DPPOPrime: _dppo_prime, IPO: _ipo,
    Reinforce: _reinforce,
}  # fmt: skip
