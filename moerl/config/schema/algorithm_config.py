"""Settings of the algorithms: `algorithm`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from moerl.config.schema.strict import Positive, Strict


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(Strict):
    """Group-relative policy optimization, arXiv:2402.03300."""

    name: Literal["grpo"] = "grpo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss for negative advantages: at most -dual_clip * advantage; None switches it off."""
    normalize_by: Literal["token", "sequence"] = "sequence"
    """token: sum over the batch / its response tokens. sequence: mean over sequences of their token means."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of KL(policy || initial model) in the loss, k3 estimate; > 0 keeps a frozen copy of the initial weights."""


@dataclass(frozen=True, kw_only=True)
class DAPOConfig(Strict):
    """Clip-higher, dynamic sampling, token-level loss, overlong shaping, arXiv:2503.14476."""

    name: Literal["dapo"] = "dapo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    max_attempts: Positive = 8
    """A step may draw at most max_attempts * groups_per_step groups before the run stops with an explanation."""
    overlong: Literal["penalty", "mask", "none"] = "penalty"
    """penalty: reward shaping near the limit. mask: truncated samples carry no loss. none: neither."""
    overlong_buffer: Positive | None = None
    """Tokens before rollout.max_response_tokens at which the penalty begins; required by overlong=penalty."""


AlgorithmConfig = Annotated[GRPOConfig | DAPOConfig, Field(discriminator="name")]
