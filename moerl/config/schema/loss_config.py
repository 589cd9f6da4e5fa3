"""Settings of a token's loss: `algorithm.objective`.

r is policy / old policy of a token, A its advantage; p and mu are its probabilities by policy and server.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moerl.config.schema.custom_part import AlgorithmPart, CustomPart, Need

Below = Annotated[float, Field(gt=0, le=1)]
Above = Annotated[float, Field(gt=0, le=1e6)]
Divergence = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class PPOClip(AlgorithmPart):
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), arXiv:1707.06347."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Below | None = 0.2
    """None: no bound below."""
    clip_high: Above | None = 0.2
    """None: no bound above."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss for negative advantages: at most -dual_clip * A (arXiv:1912.09729); None switches it off."""


@dataclass(frozen=True, kw_only=True)
class GSPO(AlgorithmPart):
    """ppo_clip with the ratio of the sequence, exp(mean log r), arXiv:2507.18071. Wants normalize_by=sequence."""

    kind: Literal["gspo", "gspo_token"]
    """gspo: one advantage for a sequence, the mean of its tokens'. gspo_token: that of each token."""
    clip_low: Below | None = 3e-4
    clip_high: Above | None = 4e-4
    dual_clip: Annotated[float, Field(gt=1)] | None = None


@dataclass(frozen=True, kw_only=True)
class CISPO(AlgorithmPart):
    """-A log p * clip(r, 1 - clip_low, 1 + clip_high), whose clipped ratio has no gradient, arXiv:2506.13585."""

    kind: Literal["cispo"]
    clip_low: Below | None = None
    clip_high: Above | None = 4.0


@dataclass(frozen=True, kw_only=True)
class SAPO(AlgorithmPart):
    """-A sigmoid(tau (r - 1)) * 4 / tau: a soft gate in place of the clip."""

    kind: Literal["sapo"]
    tau_positive: Above = 1.0
    """tau where A > 0."""
    tau_negative: Above = 1.05


@dataclass(frozen=True, kw_only=True)
class GMPO(AlgorithmPart):
    """-A times the geometric mean of the ratios of a sequence, each clipped in log space, arXiv:2507.20673. Needs normalize_by=sequence."""

    kind: Literal["gmpo"]
    clip_low: Above | None = 0.4
    """Bound of log r."""
    clip_high: Above | None = 0.4


@dataclass(frozen=True, kw_only=True)
class ClipCov(AlgorithmPart):
    """ppo_clip without the tokens of the highest covariance of log-prob and advantage in the mini-batch, arXiv:2505.22617."""

    kind: Literal["clip_cov"]
    share: Below = 2e-4
    """Part of the mini-batch's response tokens; at least one token."""
    clip_low: Below | None = 0.2
    clip_high: Above | None = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    needs: ClassVar[frozenset[Need]] = frozenset({"whole_minibatch"})


@dataclass(frozen=True, kw_only=True)
class KLCov(AlgorithmPart):
    """-A r, and for the tokens of the highest covariance of log-prob and advantage coefficient * |log r|, arXiv:2505.22617."""

    kind: Literal["kl_cov"]
    share: Below = 2e-3
    coefficient: Above = 1.0
    needs: ClassVar[frozenset[Need]] = frozenset({"whole_minibatch"})


@dataclass(frozen=True, kw_only=True)
class M2PO(AlgorithmPart):
    """-A r without the tokens of the largest (log r)^2, so many that the mean of the others is at most tau, arXiv:2510.01161."""

    kind: Literal["m2po"]
    tau: Above = 0.04
    needs: ClassVar[frozenset[Need]] = frozenset({"whole_minibatch"})


@dataclass(frozen=True, kw_only=True)
class DPPO(AlgorithmPart):
    """A trust region by the divergence of a token's probabilities in place of the ratio's clip, arXiv:2602.04879: of the tokens inside it
    -A log p * min(r, ratio_cap), whose ratio has no gradient."""

    kind: Literal["dppo_tv", "dppo_kl"]
    """dppo_tv: inside while p - mu <= high, for A <= 0 p - mu >= -low. dppo_kl: while the KL of being the token or not is at most high, for
    A <= 0 low, or the token moves back."""
    low: Divergence = 0.2
    high: Divergence = 0.2
    ratio_cap: Above = 20.0


@dataclass(frozen=True, kw_only=True)
class DPPOPrime(AlgorithmPart):
    """-A r with dppo_tv's trust region and the gradient through r, and drift_penalty * (log r)^2 of every token (prime-rl)."""

    kind: Literal["dppo_tv_prime"]
    low: Divergence = 0.2
    high: Divergence = 0.2
    drift_penalty: Annotated[float, Field(ge=0, le=1e6)] = 1e-3


@dataclass(frozen=True, kw_only=True)
class IPO(AlgorithmPart):
    """-A r of the tokens with |p - mu| <= divergence (prime-rl)."""

    kind: Literal["ipo"]
    divergence: Divergence = 0.2


@dataclass(frozen=True, kw_only=True)
class Reinforce(AlgorithmPart):
    """-A log p * r, whose ratio has no gradient."""

    kind: Literal["reinforce"]


ObjectiveConfig = Annotated[
    PPOClip | GSPO | CISPO | SAPO | GMPO | ClipCov | KLCov | M2PO | DPPO | DPPOPrime | IPO | Reinforce | CustomPart,
    Field(discriminator="kind"),
]
