"""Losses of a token whose trust region is of probabilities: the policy's and the server's, in place of a ratio's clip.

Forms and conventions: docs/algorithms.md.
"""

import torch
from torch import Tensor

from moerl.algorithms.columns import TokenColumns, TokenLoss
from moerl.config.schema.loss_config import DPPO, IPO, DPPOPrime


def dppo(config: DPPO, columns: TokenColumns) -> TokenLoss:
    outside_T = _far_by_kl(config, columns) if config.kind == "dppo_kl" else _far_by_tv(config, columns)
    weight_T = columns.ratio_T().detach().clamp(max=config.ratio_cap)
    loss_T = torch.where(outside_T, 0.0, -columns.advantage_T * weight_T * columns.logp_T)
    return TokenLoss(loss_T=loss_T, clipped_T=outside_T)


def dppo_prime(config: DPPOPrime, columns: TokenColumns) -> TokenLoss:
    outside_T = _far_by_tv(config, columns)
    inside_T = torch.where(outside_T, 0.0, -columns.advantage_T * columns.ratio_T())
    return TokenLoss(loss_T=inside_T + config.drift_penalty * columns.log_ratio_T() ** 2, clipped_T=outside_T)


def ipo(config: IPO, columns: TokenColumns) -> TokenLoss:
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
