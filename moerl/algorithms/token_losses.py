"""Per-token losses and a KL estimator: torch, float32 or float64, no masks and no sums.

Every exponent is clamped to +-20, so one absurd log-prob gives a large number instead of inf.
"""

import torch
from torch import Tensor

EXPONENT_LIMIT = 20.0
K3_LIMIT = 10.0


def ppo_clip(
    logp_T: Tensor, old_logp_T: Tensor, advantage_T: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate, arXiv:1707.06347, with separate bounds (arXiv:2503.14476) and dual clip for A < 0 (arXiv:1912.09729).

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); if A < 0 and dual_clip = c: min(-A c, that). Also returns where a clip is
    active, i.e. where the loss no longer depends on the policy.
    """
    ratio_T = torch.exp((logp_T - old_logp_T).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT))
    plain_T = -advantage_T * ratio_T
    bounded_T = -advantage_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T, clipped_T = torch.maximum(plain_T, bounded_T), bounded_T > plain_T
    if dual_clip is not None:
        ceiling_T = -advantage_T * dual_clip
        over_T = (advantage_T < 0) & (loss_T > ceiling_T)
        loss_T, clipped_T = torch.where(over_T, ceiling_T, loss_T), clipped_T | over_T
    return loss_T, clipped_T


def kl_k3(logp_T: Tensor, other_logp_T: Tensor) -> Tensor:
    """Estimator of KL(policy || other) per token (http://joschu.net/blog/kl-approx.html): exp(-d) + d - 1, d = logp - other, with d
    clamped to +-20 and the value to at most 10."""
    d_T = (logp_T - other_logp_T).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    # expm1: near d = 0 the value is d^2 / 2, which exp(-d) - 1 would lose to rounding.
    return (torch.expm1(-d_T) + d_T).clamp(-K3_LIMIT, K3_LIMIT)
