"""Weights of tokens for samples that a server drew with other probabilities than the trainer's, by `algorithm.corrections`.

rho = exp(log-prob by the old policy in the trainer - that by the server). A weight has no gradient.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moerl.algorithms.columns import EXPONENT_LIMIT, TokenColumns
from moerl.config.schema.loss_config import TIS, Correction, IcePop, OffPolicySequenceMask, Rejection, SequenceMaskTIS


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    weight_T: Tensor
    """Factor of the token's policy loss."""
    is_bounded_T: Tensor
    """bool: a bound has changed or zeroed the weight, or the token was dropped."""
    kept_T: Tensor | None = None
    """bool: tokens that stay in the mini-batch; None: all."""


class Correcting(Protocol):
    """Correction. Implementations: Shipped, and classes of kind=custom. One whose `needs` have old_logprobs is asked once for a mini-batch,
    with whole sequences and before its update; others with every micro-batch."""

    def weights(self, columns: TokenColumns) -> Weights: ...


def correction_of(config: Correction) -> Correcting:
    match config:
        case TIS() | IcePop() | Rejection() | OffPolicySequenceMask() | SequenceMaskTIS():
            return Shipped(config)
        case _:
            own: Correcting = config.build()
            return own


@dataclass(frozen=True)
class Shipped:
    config: TIS | IcePop | Rejection | OffPolicySequenceMask | SequenceMaskTIS

    @property
    def needs(self) -> frozenset[Any]:
        return self.config.needs

    @property
    def is_normalized(self) -> bool:
        return isinstance(self.config, TIS) and self.config.normalized

    def weights(self, columns: TokenColumns) -> Weights:
        match self.config:
            case TIS():
                return _tis(self.config, columns)
            case IcePop():
                return _icepop(self.config, columns)
            case Rejection():
                return _rejection(self.config, columns)
            case OffPolicySequenceMask():
                return _opsm(self.config, columns)
            case SequenceMaskTIS():
                return _sequence_mask_tis(self.config, columns)


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
