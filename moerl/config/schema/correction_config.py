"""Settings of `algorithm.corrections`. rho is old policy in the trainer / server, for a token; every bound is one of rho."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moerl.config.schema.custom_part import AlgorithmPart, CustomPart, Need
from moerl.config.schema.strict import Strict

Bound = Annotated[float, Field(gt=0, le=1e9)]
BoundBelow = Annotated[float, Field(ge=0, le=1e9)]
Level = Literal["token", "sum", "mean", "max"]
"""Reach of a statistic: a token, or the response tokens of a sequence."""


@dataclass(frozen=True, kw_only=True)
class TIS(Strict):
    """Truncated importance sampling: min(rho, cap)."""

    kind: Literal["tis"]
    level: Literal["token", "sequence"] = "token"
    """sequence: the product of all rho of a sequence, for each of its tokens."""
    cap: Bound = 2.0
    normalized: bool = False
    """Divided by the mean weight of the mini-batch's tokens."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"old_logprobs"}) if self.normalized else frozenset()


@dataclass(frozen=True, kw_only=True)
class IcePop(AlgorithmPart):
    """rho inside [low, high], 0 outside. The token stays in every count."""

    kind: Literal["icepop"]
    low: BoundBelow = 0.5
    high: Bound = 5.0


@dataclass(frozen=True, kw_only=True)
class Rejection(AlgorithmPart):
    """Tokens or sequences whose statistic leaves [low, high] are no part of the mini-batch: neither of its loss nor of its counts."""

    kind: Literal["rejection"]
    statistic: Literal["k1", "k2", "k3"] = "k1"
    """Estimates for a token of KL(server || trainer): k1 -log rho, k2 (log rho)^2 / 2, k3 rho - 1 - log rho. Bounds are of the statistic
    for k2 and k3, and of exp(-k1) for k1: of rho, the product of a sequence's, their geometric mean, or the largest."""
    level: Level = "mean"
    """token: each for itself. sum, mean, max: over a sequence, which goes as a whole."""
    low: BoundBelow | None = None
    """None: no bound below."""
    high: Bound | None = None
    needs: ClassVar[frozenset[Need]] = frozenset({"old_logprobs"})


@dataclass(frozen=True, kw_only=True)
class OffPolicySequenceMask(AlgorithmPart):
    """0 for a sequence whose advantage is negative and whose mean of log(mu / policy) is above delta, arXiv:2512.02556; mu the server's
    probability."""

    kind: Literal["opsm"]
    delta: BoundBelow = 0.1


@dataclass(frozen=True, kw_only=True)
class SequenceMaskTIS(AlgorithmPart):
    """rho of a token, not truncated; 0 for a sequence whose geometric mean of rho leaves [low, high]."""

    kind: Literal["sequence_mask_tis"]
    low: BoundBelow = 0.99
    high: Bound = 1.01


Correction = Annotated[TIS | IcePop | Rejection | OffPolicySequenceMask | SequenceMaskTIS | CustomPart, Field(discriminator="kind")]
