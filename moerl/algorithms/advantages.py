"""Credit of samples and tokens, from the rewards of a whole step: numpy, float64. Forms and conventions: docs/algorithms.md.

Axis suffixes: `_S` samples of the step, `_N` their response tokens end to end, in the samples' order: what the policy did not produce is
not there, and what comes before and after it are neighbours.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moerl.config.schema.algorithm_config import (
    Advantage,
    GAEAdvantage,
    GroupAdvantage,
    PassAtKAdvantage,
    PrimeAdvantage,
    ReinforceAdvantage,
    ReMaxAdvantage,
)
from moerl.types.errors import DataError

STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """Columns of the response tokens of a step [N]; None where nobody needs them."""

    penalties_N: np.ndarray | None = None
    """float64, taken from the reward of each token: the KL of a reward."""
    values_N: np.ndarray | None = None
    """float64, a critic's estimate of the rewards from this token on."""
    process_N: np.ndarray | None = None
    """float64, log-prob by the model of outcomes minus the reference's."""
    old_N: np.ndarray | None = None
    """float64, log-prob by the trainer before the update, where the advantage's `needs` have old_logprobs; so for the next."""
    reference_N: np.ndarray | None = None
    turn_N: np.ndarray | None = None
    """int64, number of the token's turn in its sample, from 0: tokens that the policy produced one after the other. For classes of
    `kind: custom`."""
    token_ids_N: np.ndarray | None = None
    """int64, where `needs` have tokens; so for the next."""
    rollout_N: np.ndarray | None = None
    """float64, log-prob by the server that sampled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredStep:
    """Samples of a step that are trained on."""

    rewards_S: np.ndarray
    """float64, after shaping."""
    group_S: np.ndarray
    """int64, number of the sample's group, from 0."""
    lengths_S: np.ndarray
    """int64, response tokens."""
    greedy_S: np.ndarray | None = None
    """float64, reward of the completion at temperature 0 of the same prompt."""
    tokens: ScoredTokens = ScoredTokens()

    @property
    def num_tokens(self) -> int:
        return int(self.lengths_S.sum())

    def groups(self) -> Iterator[np.ndarray]:
        """Samples of each group, as indices."""
        for group in np.unique(self.group_S):
            yield np.flatnonzero(self.group_S == group)

    def spread(self, values_S: np.ndarray) -> np.ndarray:
        """[N], the sample's value for each of its tokens."""
        return np.repeat(values_S, self.lengths_S)

    def spans(self) -> Iterator[slice]:
        """Tokens of each sample."""
        ends = np.cumsum(self.lengths_S)
        yield from (slice(int(end - length), int(end)) for length, end in zip(self.lengths_S, ends, strict=True))

    def rewards_N(self) -> np.ndarray:
        """float64 [N]: a sample's reward at its last token, and the tokens' penalties."""
        rewards_N = np.zeros(self.num_tokens) if self.tokens.penalties_N is None else -self.tokens.penalties_N.astype(np.float64)
        some = self.lengths_S > 0
        rewards_N[np.cumsum(self.lengths_S)[some] - 1] += self.rewards_S[some]
        return rewards_N


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Credit of samples or of tokens."""

    advantages_S: np.ndarray | None = None
    """float64 [S], for all tokens of a sample."""
    advantages_N: np.ndarray | None = None
    """float64 [N]"""
    returns_N: np.ndarray | None = None
    """float64 [N], what a critic is to estimate."""

    def by_token(self, step: ScoredStep) -> np.ndarray:
        """float64 [N]. DataError for another number of them than the step has: one number would pass for all."""
        name, given, wanted = ("advantages_S", self.advantages_S, len(step.lengths_S))
        if self.advantages_N is not None:
            name, given, wanted = ("advantages_N", self.advantages_N, step.num_tokens)
        if given is None:
            raise DataError("algorithm.advantage returned a Credit without advantages: must have advantages_S or advantages_N")
        _require_numbers(name, given, wanted)
        return given if self.advantages_N is not None else step.spread(given)

    def checked_returns(self, step: ScoredStep) -> np.ndarray | None:
        """float64 [N], likewise; None where there are none."""
        if self.returns_N is not None:
            _require_numbers("returns_N", self.returns_N, step.num_tokens)
        return self.returns_N


def _require_numbers(name: str, given: Any, wanted: int) -> None:
    if np.shape(given) != (wanted,):
        raise DataError(f"algorithm.advantage returned {name} of shape {np.shape(given)}: must be ({wanted},)")
    if (dtype := np.asarray(given).dtype).kind not in "biuf":
        raise DataError(f"algorithm.advantage returned {name} of dtype {dtype}: must be real numbers")


class AdvantageEstimator(Protocol):
    """Advantages of a step. Implementations: `estimator` of each kind, and classes of `algorithm.advantage.kind=custom`."""

    def __call__(self, step: ScoredStep) -> Credit: ...


def advantage_estimator(config: Advantage) -> AdvantageEstimator:
    match config:
        case GroupAdvantage():
            return _by_sample(_GROUP[config.kind])
        case PassAtKAdvantage():
            return _by_sample(lambda step: _in_groups(step, lambda rewards: _best(rewards, by_std=config.by_std)))
        case ReinforceAdvantage(kind="reinforce_pp"):
            return lambda step: Credit(advantages_N=whitened(_to_come(step, step.rewards_N(), config.gamma)))
        case ReinforceAdvantage():
            return _reinforce_baseline
        case ReMaxAdvantage():
            return _remax
        case GAEAdvantage():
            return lambda step: _gae(step, gamma=config.gamma, lam=config.lam)
        case PrimeAdvantage():
            return lambda step: _prime(step, beta=config.beta)
        case _:
            own: AdvantageEstimator = config.build()
            return own


def turns(is_response_T: np.ndarray, starts: np.ndarray, lengths_S: np.ndarray) -> np.ndarray:
    """int64 [N] of ScoredTokens. `starts`: where the sequences of [T] begin; `lengths_S`: response tokens of each sample."""
    goes_on_T = np.append(False, is_response_T[:-1])
    goes_on_T[starts[starts < len(goes_on_T)]] = False  # an empty sequence may begin at the end
    number_N = np.cumsum(~goes_on_T[is_response_T])
    first_N = np.repeat(np.cumsum(lengths_S) - lengths_S, lengths_S)
    return number_N - number_N[first_N]


def whitened(values: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
    """(x - mean) / sqrt(unbiased variance + 1e-8), mean and variance over all of them. `counted`: bool, over these."""
    counted = np.ones(len(values), dtype=bool) if counted is None else counted
    if counted.sum() < 2:
        return np.zeros_like(values, dtype=np.float64)
    centered = _centered(values, counted)
    return centered / np.sqrt(centered[counted].var(ddof=1) + VARIANCE_EPSILON)


def whitened_rewards(rewards_S: np.ndarray, lengths_S: np.ndarray) -> np.ndarray:
    """float64 [S], over the samples that have a response token."""
    return whitened(rewards_S.astype(np.float64), lengths_S > 0)


def _centered(values: np.ndarray, counted: np.ndarray | slice = slice(None)) -> np.ndarray:
    # Rounding in the mean of equal values would leave a credit near 1e-10; subtracting one of them first makes it exactly 0.
    shifted = values - values[counted][0]
    centered = shifted - shifted[counted].mean()
    return np.where(is_rounding(centered, values), 0.0, centered)


def _by_sample(advantages: Callable[[ScoredStep], np.ndarray]) -> AdvantageEstimator:
    """All tokens of a sample have its advantage; penalties of tokens are part of its reward."""

    def credit(step: ScoredStep) -> Credit:
        return Credit(advantages_S=advantages(_with_penalties(step)))

    return credit


def _with_penalties(step: ScoredStep) -> ScoredStep:
    if step.tokens.penalties_N is None:
        return step
    penalties = [step.tokens.penalties_N[span].sum() for span in step.spans()]
    return ScoredStep(rewards_S=step.rewards_S - penalties, group_S=step.group_S, lengths_S=step.lengths_S, greedy_S=step.greedy_S)


def _in_groups(step: ScoredStep, credit: Callable[..., np.ndarray], *columns: np.ndarray) -> np.ndarray:
    """float64 [S]: f(rewards of a group, of each column the same samples); 0 for a lone sample."""
    credit_S = np.zeros(len(step.rewards_S))
    for group in step.groups():
        if len(group) >= 2:
            credit_S[group] = credit(step.rewards_S[group].astype(np.float64), *(column[group] for column in columns))
    return credit_S


def _grpo(rewards: np.ndarray) -> np.ndarray:
    centered = _centered(rewards)
    normalized: np.ndarray = centered / (centered.std(ddof=1) + STD_EPSILON)
    return normalized


def _rloo(rewards: np.ndarray) -> np.ndarray:
    return _centered(rewards) * len(rewards) / (len(rewards) - 1)


def _opo(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    shifted = rewards - rewards[0]
    credit = shifted - (lengths * shifted).sum() / max(lengths.sum(), 1)
    return np.where(is_rounding(credit, rewards), 0.0, credit)


def _maxrl(rewards: np.ndarray) -> np.ndarray:
    mean = rewards.mean()
    return np.zeros_like(rewards) if is_rounding(mean, rewards) else _centered(rewards) / mean


def is_rounding(difference: Any, rewards: np.ndarray) -> Any:
    """A difference of rewards that is 0 but for rounding, which depends on the samples' order. None is where a reward is infinite."""
    return np.isfinite(difference) & (np.abs(difference) <= 1e-12 * np.abs(rewards).max(initial=0.0))


def _best(rewards: np.ndarray, *, by_std: bool) -> np.ndarray:
    second, best = np.sort(rewards)[-2:]
    credit = np.zeros_like(rewards)
    credit[rewards.argmax()] = 0.0 if is_rounding(best - second, rewards) else best - second
    return credit / (rewards.std(ddof=1) + STD_EPSILON) if by_std else credit


def _gpg(step: ScoredStep) -> np.ndarray:
    centered_S, has_tokens_S = _in_groups(step, _centered), step.lengths_S > 0
    num_different = np.count_nonzero(has_tokens_S & ~is_rounding(centered_S, step.rewards_S))
    scaled: np.ndarray = centered_S * has_tokens_S.sum() / max(num_different, 1)
    return scaled


_GROUP: dict[str, Callable[[ScoredStep], np.ndarray]] = {
    "grpo": lambda step: _in_groups(step, _grpo),
    "dr_grpo": lambda step: _in_groups(step, _centered),
    "rloo": lambda step: _in_groups(step, _rloo),
    "opo": lambda step: _in_groups(step, _opo, step.lengths_S),
    "gpg": _gpg,
    "maxrl": lambda step: _in_groups(step, _maxrl),
}


def _to_come(step: ScoredStep, rewards_N: np.ndarray, gamma: float) -> np.ndarray:
    """float64 [N]: y_t = rewards_t + gamma * y_(t+1) within each sample. All samples take a step at a time, from their ends."""
    ends_S = np.cumsum(step.lengths_S)
    sums_N, ahead_S = np.zeros(len(rewards_N)), np.zeros(len(ends_S))
    for distance in range(1, int(step.lengths_S.max(initial=0)) + 1):
        going = np.flatnonzero(step.lengths_S >= distance)
        tokens = ends_S[going] - distance
        ahead_S[going] = sums_N[tokens] = rewards_N[tokens] + gamma * ahead_S[going]
    return sums_N


def _reinforce_baseline(step: ScoredStep) -> Credit:
    whitened_N = whitened(step.spread(_in_groups(_with_penalties(step), _centered)))
    # A lone sample was compared with nothing: whitening must not give it the distance of its 0 from the mean.
    return Credit(advantages_N=whitened_N * step.spread(_in_groups(step, np.ones_like)))


def _remax(step: ScoredStep) -> Credit:
    assert step.greedy_S is not None, "remax needs the rewards of completions at temperature 0"
    return Credit(advantages_N=_to_come(step, step.rewards_N(), 1.0) - step.spread(step.greedy_S))


def _gae(step: ScoredStep, *, gamma: float, lam: float) -> Credit:
    values_N = _given(step.tokens.values_N, "gae needs the values of a critic")
    next_N = np.append(values_N[1:], 0.0)
    next_N[np.cumsum(step.lengths_S)[step.lengths_S > 0] - 1] = 0.0  # after the last token of a sample
    advantages_N = _to_come(step, step.rewards_N() + gamma * next_N - values_N, gamma * lam)
    return Credit(advantages_N=whitened(advantages_N), returns_N=advantages_N + values_N)


def _prime(step: ScoredStep, *, beta: float) -> Credit:
    rewards_N = beta * _given(step.tokens.process_N, "prime needs log-probs of a model of outcomes")
    if step.tokens.penalties_N is not None:
        rewards_N = rewards_N - step.tokens.penalties_N
    spans = list(step.spans())
    means_S = np.array([rewards_N[span].mean() if span.stop > span.start else 0.0 for span in spans])
    process_N = np.zeros(step.num_tokens)
    for group in step.groups():
        n = len(group)
        for sample in group if n >= 2 else ():
            others = (means_S[group].sum() - means_S[sample]) / (n - 1)
            process_N[spans[sample]] = rewards_N[spans[sample]] - others
    return Credit(advantages_N=_to_come(step, process_N, 1.0) + step.spread(_in_groups(step, _rloo)))


def _given(values_N: Any, otherwise: str) -> np.ndarray:
    assert values_N is not None, otherwise
    return np.asarray(values_N, dtype=np.float64)
