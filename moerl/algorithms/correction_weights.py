"""Weights of tokens by the corrections of `algorithm.corrections` that moerl ships: torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moerl.algorithms.columns import TokenColumns, Weights
from moerl.algorithms.kl_formulas import EXPONENT_LIMIT
from moerl.config.schema.correction_config import TIS, IcePop, OffPolicySequenceMask, Rejection, SequenceMaskTIS


def correction_weights(config: Any, columns: TokenColumns) -> Weights:
    return _WEIGHTS[type(config)](config, columns)


def _exp(log_T: Tensor) -> Tensor:
    return log_T.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


def _tis(config: TIS, columns: TokenColumns) -> Weights:
    log_rho_T = columns.log_rho_T()
    rho_T = _exp(log_rho_T if config.level == "token" else columns.sums_T(log_rho_T))
    return Weights(weight_T=rho_T.clamp(max=config.cap), is_bounded_T=rho_T > config.cap)


def _icepop(config: IcePop, columns: TokenColumns) -> Weights:
    rho_T = _exp(columns.log_rho_T())
    outside_T = (rho_T < config.low) | (rho_T > config.high)
    return Weights(weight_T=torch.where(outside_T, 0.0, rho_T), is_bounded_T=outside_T)


def _rejection(config: Rejection, columns: TokenColumns) -> Weights:
    log_rho_T = columns.log_rho_T()
    match config.statistic:
        case "k1":
            statistic_T = log_rho_T
        case "k2":
            statistic_T = log_rho_T**2 / 2
        case "k3":
            statistic_T = _exp(log_rho_T) - 1 - log_rho_T
    match config.level:
        case "sum":
            statistic_T = columns.sums_T(statistic_T)
        case "mean":
            statistic_T = columns.means_T(statistic_T)
        case "max":
            statistic_T = columns.largest_T(statistic_T)
    if config.statistic == "k1":
        statistic_T = _exp(statistic_T)
    outside_T = torch.zeros_like(columns.mask_T)
    if config.low is not None:
        outside_T = outside_T | (statistic_T < config.low)
    if config.high is not None:
        outside_T = outside_T | (statistic_T > config.high)
    return Weights(weight_T=torch.ones_like(log_rho_T), is_bounded_T=outside_T, kept_T=~outside_T)


def _opsm(config: OffPolicySequenceMask, columns: TokenColumns) -> Weights:
    drift_T = columns.means_T(columns.rollout_logp_T - columns.logp_T.detach())
    dropped_T = (columns.means_T(columns.advantage_T) < 0) & (drift_T > config.delta)
    return Weights(weight_T=(~dropped_T).to(drift_T.dtype), is_bounded_T=dropped_T)


def _sequence_mask_tis(config: SequenceMaskTIS, columns: TokenColumns) -> Weights:
    log_rho_T = columns.log_rho_T()
    mean_T = _exp(columns.means_T(log_rho_T))
    outside_T = (mean_T < config.low) | (mean_T > config.high)
    return Weights(weight_T=torch.where(outside_T, 0.0, _exp(log_rho_T)), is_bounded_T=outside_T)


_WEIGHTS: dict[type, Callable[[Any, TokenColumns], Weights]] = {
    TIS: _tis, IcePop: _icepop, Rejection: _rejection, OffPolicySequenceMask: _opsm, SequenceMaskTIS: _sequence_mask_tis,
}  # fmt: skip
