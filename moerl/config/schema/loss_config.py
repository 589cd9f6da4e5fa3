"""Settings of a token's loss: `algorithm.objective` and `algorithm.corrections`.

r is policy / old policy of a token, A its advantage; p and mu are its probabilities by policy and server; rho is old policy in the trainer
/ server, of which every bound of a correction is.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moerl.config.schema.custom_part import CustomPart, Need
from moerl.config.schema.strict import Strict

Below = Annotated[float, Field(gt=0, le=1)]
Above = Annotated[float, Field(gt=0, le=1e6)]
Divergence = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class PPOClip(Strict):
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), arXiv:1707.06347."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Below | None = 0.2
    """None: no bound below."""
    clip_high: Above | None = 0.2
    """None: no bound above."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss for negative advantages: at most -dual_clip * A (arXiv:1912.09729); None switches it off."""
    needs: ClassVar[frozenset[Need]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class GSPO(Strict):
    """ppo_clip with the ratio of the sequence, exp(mean log r), arXiv:2507.18071. Wants normalize_by=sequence."""

    kind: Literal["gspo", "gspo_token"]
    """gspo: one advantage for a sequence, the mean of its tokens'. gspo_token: that of each token."""
    clip_low: Below | None = 3e-4
    clip_high: Above | None = 4e-4
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    needs: ClassVar[frozenset[Need]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class CISPO(Strict):
    """-A log p * clip(r, 1 - clip_low, 1 + clip_high), whose clipped ratio has no gradient, arXiv:2506.13585."""

    kind: Literal["cispo"]
    clip_low: Below | None = None
    clip_high: Above | None = 4.0
    needs: ClassVar[frozenset[Need]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class SAPO(Strict):
    """-A sigmoid(tau (r - 1)) * 4 / tau: a soft gate in place of the clip."""

    kind: Literal["sapo"]
    tau_positive: Above = 1.0
    """tau where A > 0."""
    tau_negative: Above = 1.05
    needs: ClassVar[frozenset[Need]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class GMPO(Strict):
    """-A times the geometric mean of the ratios of a sequence, each clipped in log space, arXiv:2507.20673. Needs normalize_by=sequence."""

    kind: Literal["gmpo"]
    clip_low: Above | None = 0.4
    """Bound of log r."""
    clip_high: Above | None = 0.4
    needs: ClassVar[frozenset[Need]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class ClipCov(Strict):
    """ppo_clip without the tokens of the highest covariance of log-prob and advantage in the mini-batch, arXiv:2505.22617."""

    kind: Literal["clip_cov"]
    share: Below = 2e-4
    """Part of the mini-batch's response tokens; at least one token."""
    clip_low: Below | None = 0.2
    clip_high: Above | None = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    needs: ClassVar[frozenset[Need]] = frozenset({"whole_minibatch"})


@dataclass(frozen=True, kw_only=True)
class KLCov(Strict):
    """-A r, and for the tokens of the highest covariance of log-prob and advantage coefficient * |log r|, arXiv:2505.22617."""

    kind: Literal["kl_cov"]
    share: Below = 2e-3
    coefficient: Above = 1.0
    needs: ClassVar[frozenset[Need]] = frozenset({"whole_minibatch"})


@dataclass(frozen=True, kw_only=True)
class M2PO(Strict):
    """-A r without the tokens of the largest (log r)^2, so many that the mean of the others is at most tau, arXiv:2510.01161."""

    kind: Literal["m2po"]
    tau: Above = 0.04
    needs: ClassVar[frozenset[Need]] = frozenset({"whole_minibatch"})


@dataclass(frozen=True, kw_only=True)
class DPPO(Strict):
    """A trust region by the divergence of a token's probabilities in place of the ratio's clip, arXiv:2602.04879: of the tokens inside it
    -A log p * min(r, ratio_cap), whose ratio has no gradient."""

    kind: Literal["dppo_tv", "dppo_kl"]
    """dppo_tv: inside while p - mu <= high, for A <= 0 p - mu >= -low. dppo_kl: while the KL of being the token or not is at most high, for
    A <= 0 low, or the token moves back."""
    low: Divergence = 0.2
    high: Divergence = 0.2
    ratio_cap: Above = 20.0
    needs: ClassVar[frozenset[Need]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class DPPOPrime(Strict):
    """-A r with dppo_tv's trust region and the gradient through r, and drift_penalty * (log r)^2 of every token (prime-rl)."""

    kind: Literal["dppo_tv_prime"]
    low: Divergence = 0.2
    high: Divergence = 0.2
    drift_penalty: Annotated[float, Field(ge=0, le=1e6)] = 1e-3
    needs: ClassVar[frozenset[Need]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class IPO(Strict):
    """-A r of the tokens with |p - mu| <= divergence (prime-rl)."""

    kind: Literal["ipo"]
    divergence: Divergence = 0.2
    needs: ClassVar[frozenset[Need]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Reinforce(Strict):
    """-A log p * r, whose ratio has no gradient."""

    kind: Literal["reinforce"]
    needs: ClassVar[frozenset[Need]] = frozenset()


ObjectiveConfig = Annotated[
    PPOClip | GSPO | CISPO | SAPO | GMPO | ClipCov | KLCov | M2PO | DPPO | DPPOPrime | IPO | Reinforce | CustomPart,
    Field(discriminator="kind"),
]

# -- corrections -----------------------------------------------------------------------------------------------

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
class IcePop(Strict):
    """rho inside [low, high], 0 outside. The token stays in every count."""

    kind: Literal["icepop"]
    low: BoundBelow = 0.5
    high: Bound = 5.0
    needs: ClassVar[frozenset[Need]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Rejection(Strict):
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
class OffPolicySequenceMask(Strict):
    """0 for a sequence whose advantage is negative and whose mean of log(mu / policy) is above delta, arXiv:2512.02556; mu the server's
    probability."""

    kind: Literal["opsm"]
    delta: BoundBelow = 0.1
    needs: ClassVar[frozenset[Need]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class SequenceMaskTIS(Strict):
    """rho of a token, not truncated; 0 for a sequence whose geometric mean of rho leaves [low, high]."""

    kind: Literal["sequence_mask_tis"]
    low: BoundBelow = 0.99
    high: Bound = 1.01
    needs: ClassVar[frozenset[Need]] = frozenset()


Correction = Annotated[TIS | IcePop | Rejection | OffPolicySequenceMask | SequenceMaskTIS | CustomPart, Field(discriminator="kind")]
