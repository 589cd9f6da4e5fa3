"""Settings of the algorithm: `algorithm`. An advantage, an objective and corrections, which go with each other as they are.

Forms and conventions are those of docs/algorithms.md. `needs` of each kind says what a step must bring beside rewards and log-probs; rules
and loop read it there.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moerl.config.schema.correction_config import Correction
from moerl.config.schema.custom_part import AlgorithmPart, CustomPart, Need
from moerl.config.schema.loss_config import ObjectiveConfig
from moerl.config.schema.strict import Positive, Share, Strict

KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+", "unbiased"]


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage(AlgorithmPart):
    """One number for a sample, from the rewards of its group."""

    kind: Literal["grpo", "dr_grpo", "rloo", "opo", "gpg", "maxrl"]
    """grpo: (reward - mean) / (unbiased std + 1e-6), arXiv:2402.03300. dr_grpo: reward - mean, arXiv:2503.20783. rloo: that * n / (n - 1),
    arXiv:2402.14740. opo: reward - mean weighted by response lengths, arXiv:2505.23585. gpg: dr_grpo's * samples of the step / those whose
    advantage is not 0, arXiv:2504.02546. maxrl: (reward - mean) / mean, 0 where the mean is 0, arXiv:2602.02710."""


@dataclass(frozen=True, kw_only=True)
class PassAtKAdvantage(AlgorithmPart):
    """The best sample of a group gets its reward minus the second best's, the others 0; so do all where several are best."""

    kind: Literal["passk"]
    by_std: bool = False
    """Divided by the group's (unbiased std + 1e-6)."""


@dataclass(frozen=True, kw_only=True)
class ReinforceAdvantage(AlgorithmPart):
    """REINFORCE++, arXiv:2501.03262: whitened over all response tokens of the step."""

    kind: Literal["reinforce_pp", "reinforce_pp_baseline"]
    """reinforce_pp: rewards to come, discounted. reinforce_pp_baseline: reward - mean of the group, for every token."""
    gamma: Share = 1.0
    """Discount of a token's reward for the token before; of reinforce_pp."""


@dataclass(frozen=True, kw_only=True)
class ReMaxAdvantage(AlgorithmPart):
    """Rewards to come minus the reward of a completion without chance of the same prompt, arXiv:2310.10505."""

    kind: Literal["remax"]
    needs: ClassVar[frozenset[Need]] = frozenset({"greedy_sample"})


@dataclass(frozen=True, kw_only=True)
class GAEAdvantage(AlgorithmPart):
    """Generalized advantage estimation from a critic's values, arXiv:1506.02438, whitened over all response tokens of the step."""

    kind: Literal["gae"]
    gamma: Share = 1.0
    lam: Share = 0.95
    """Weight of longer estimates; 1: rewards to come minus the value."""
    needs: ClassVar[frozenset[Need]] = frozenset({"values"})


@dataclass(frozen=True, kw_only=True)
class PrimeAdvantage(AlgorithmPart):
    """Rewards of the process that follow from a model of outcomes, arXiv:2502.01456: beta * (its log-prob - the reference's) of a token. A
    baseline that leaves out the sample itself for these and for the outcome, and their sum to come."""

    kind: Literal["prime"]
    beta: Annotated[float, Field(gt=0)] = 0.05
    needs: ClassVar[frozenset[Need]] = frozenset({"process_rewards"})


Advantage = Annotated[
    GroupAdvantage | PassAtKAdvantage | ReinforceAdvantage | ReMaxAdvantage | GAEAdvantage | PrimeAdvantage | CustomPart,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Strict):
    advantage: Advantage
    """Credit of a token."""
    objective: ObjectiveConfig
    """Loss of a token."""
    corrections: tuple[Correction, ...] = ()
    """Weights for what the server sampled with other probabilities than the trainer's. They multiply the objective's loss, after its clip,
    and neither a KL nor an entropy term."""
    normalize_by: Literal["token", "sequence", "sequence_sum", "fixed_length"] = "sequence"
    """token: sum over the mini-batch / its response tokens. sequence: mean over sequences of their token means. sequence_sum: mean over
    sequences of their sums. fixed_length: sum / (sequences * fixed_length)."""
    fixed_length: Positive | None = None
    """Tokens of normalize_by=fixed_length: the same for every batch (Dr. GRPO: the longest response)."""
    kl_coefficient: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Weight of KL(policy || initial model); > 0 keeps a frozen copy of the initial weights."""
    kl_estimator: KLEstimator = "k3"
    """Estimate of a token, with d = log-prob - reference's: k1 d; abs |d|; k2 d^2 / 2; k3 exp(-d) + d - 1 (http://joschu.net/blog/kl-approx.html).
    With + that value with the gradient of k2. unbiased: k3 * policy / old policy, with the gradient of both (arXiv:2512.02556)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss. reward: taken from every token's reward, by the log-probs before the update."""
    kl_target: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """KL that an adaptive coefficient steers to, in nats per token (arXiv:1909.08593); None: the coefficient is fixed."""
    kl_horizon: Positive = 10_000
    """Samples over which the adaptive coefficient changes by about the whole error."""
    entropy_bonus: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Weight of the policy's entropy, taken from the loss."""
    drift_penalty: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Weight of log(policy / old policy)^2 of a token in the loss (arXiv:2602.02276)."""
    whiten_rewards: bool = False
    """Rewards of a step get mean 0 and variance 1 before the advantages."""
    max_attempts: Positive = 1
    """> 1: groups whose samples all have the same reward are replaced (dynamic sampling, arXiv:2503.14476); a step may draw at most
    max_attempts * groups_per_step groups before the run stops with an explanation."""
    overlong: Literal["penalty", "mask", "none"] = "none"
    """penalty: reward shaping near the limit (arXiv:2503.14476, equation 13). mask: truncated samples carry no loss. none: neither."""
    overlong_buffer: Positive | None = None
    """Tokens before rollout.max_response_tokens at which the penalty begins; required by overlong=penalty."""

    @property
    def needs(self) -> frozenset[Need]:
        """Things a step must bring for it, beside rewards, log-probs of the server, and those of the policy as it is trained."""
        needs: frozenset[Need] = self.advantage.needs | self.objective.needs
        for correction in self.corrections:
            needs |= correction.needs
        if self.kl_coefficient > 0:
            needs |= {"reference"} if self.kl_in == "loss" else {"reference", "old_logprobs"}
        return needs

    @property
    def credits_tokens(self) -> bool:
        """Tokens of a sample have different credit, for which log-probs or values may come first; else it follows from rewards alone."""
        by_token = isinstance(self.advantage, ReinforceAdvantage | ReMaxAdvantage | GAEAdvantage | PrimeAdvantage | CustomPart)
        return by_token or (self.kl_coefficient > 0 and self.kl_in == "reward")
