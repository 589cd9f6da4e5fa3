"""Algorithm: what the driver decides about groups, and the loss that the ranks compute; both from one section of settings.

Axis suffixes: `_G` samples of a group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moerl.algorithms.advantages import Credit, ScoredStep, advantage_estimator, is_rounding, whitened_rewards
from moerl.algorithms.kl_formulas import adapted
from moerl.algorithms.mini_batch_loss import SUPERVISED, Loss, loss_of
from moerl.config.schema.algorithm_config import AlgorithmConfig
from moerl.types.errors import DataError
from moerl.types.groups import Group
from moerl.types.stats import StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """All methods are pure."""

    config: AlgorithmConfig
    max_response_tokens: int
    kl_coefficient: float
    """As it is now; that of the settings, unless it is adaptive."""
    loss: Loss

    def keeps_group(self, group: Group) -> bool:
        """Whether the group is worth training on; one that is not is replaced by the next prompt (dynamic sampling).

        DAPO's condition is on correctness (section 3.2), hence on rewards *before* shaping: after it, a group that is right everywhere and
        long once would count as informative and train on length alone.
        """
        if self.config.max_attempts == 1:
            return True
        rewards = group.rewards_G[self.sample_mask(group)]
        if group.greedy is not None:  # what remax compares with
            rewards = np.append(rewards, group.greedy.reward)
        return len(rewards) > 0 and not is_rounding(np.ptp(rewards), rewards)

    def sample_mask(self, group: Group) -> np.ndarray:
        """bool [G]. A sample outside the mask carries no loss, and its reward enters nothing; with overlong=mask, truncated ones too, and
        all of a group that lacks the baseline it needs."""
        scored = np.array([sample.score.error is None for sample in group.samples], dtype=bool)
        if "greedy_sample" in self.config.needs and group.greedy is None:
            return np.zeros_like(scored)
        return scored & ~_truncated(group) if self.config.overlong == "mask" else scored

    def rewards(self, group: Group) -> np.ndarray:
        """float64 [G], after shaping."""
        if self.config.overlong != "penalty":
            return group.rewards_G
        return group.rewards_G + overlong_penalty(self.config, self.max_response_tokens, group.lengths_G, _truncated(group))

    def scored_step(self, groups: Sequence[Group]) -> ScoredStep:
        """Samples in the masks, of all groups in order."""
        masks = [self.sample_mask(group) for group in groups]
        rewards_S = np.concatenate([self.rewards(group)[mask] for group, mask in zip(groups, masks, strict=True)] or [np.zeros(0)])
        lengths_S = np.concatenate([group.lengths_G[mask] for group, mask in zip(groups, masks, strict=True)] or [np.zeros(0, np.int64)])
        counts = [int(mask.sum()) for mask in masks]
        greedy_G = [0.0 if group.greedy is None else group.greedy.reward for group in groups]  # 0: its mask has no sample
        return ScoredStep(
            rewards_S=whitened_rewards(rewards_S, lengths_S) if self.config.whiten_rewards else rewards_S.astype(np.float64),
            group_S=np.repeat(np.arange(len(groups)), counts),
            lengths_S=lengths_S,
            greedy_S=np.repeat(greedy_G, counts) if "greedy_sample" in self.config.needs else None,
        )

    def credit(self, step: ScoredStep) -> Credit:
        credit = advantage_estimator(self.config.advantage)(step)
        if not isinstance(credit, Credit):
            raise DataError(f"algorithm.advantage returned {type(credit).__name__}: must be a Credit, with advantages_S or advantages_N")
        return credit

    def after_step(self, stats: StepStats, groups: Sequence[Group]) -> "Algorithm":
        """The algorithm of the step after the one on `groups`; the same where its weights did not change, or its KL is no number."""
        target, kl = self.config.kl_target, stats.kl_reference
        if target is None or kl is None or not math.isfinite(kl) or stats.skipped_updates or stats.learning_rate == 0:
            return self
        num_samples, horizon = sum(len(group.samples) for group in groups), self.config.kl_horizon
        return self._with(adapted(self.kl_coefficient, kl=kl, target=target, horizon=horizon, num_samples=num_samples))

    def state(self) -> dict[str, Any]:
        """Part of it that a checkpoint keeps."""
        return {"kl_coefficient": self.kl_coefficient} if self.config.kl_target is not None else {}

    def resumed(self, state: Mapping[str, Any]) -> "Algorithm":
        is_adaptive = self.config.kl_target is not None and "kl_coefficient" in state
        return self._with(state["kl_coefficient"]) if is_adaptive else self

    def _with(self, kl_coefficient: float) -> "Algorithm":
        in_loss = kl_coefficient if self.config.kl_in == "loss" else 0.0
        return replace(self, kl_coefficient=kl_coefficient, loss=replace(self.loss, kl_coefficient=in_loss))


def build_algorithm(config: AlgorithmConfig, max_response_tokens: int, *, trains_rewards: bool = True) -> Algorithm:
    """`trains_rewards` False: the objective and what is added to it are no part of the loss; groups are judged as with it."""
    loss = loss_of(config) if trains_rewards else SUPERVISED
    return Algorithm(config=config, max_response_tokens=max_response_tokens, kl_coefficient=config.kl_coefficient, loss=loss)


def overlong_penalty(config: AlgorithmConfig, max_response_tokens: int, lengths: np.ndarray, is_truncated: np.ndarray) -> np.ndarray:
    """0 up to max_response_tokens - overlong_buffer, then linearly to -1 at max_response_tokens; -1 if truncated (arXiv:2503.14476,
    equation 13)."""
    buffer = config.overlong_buffer
    assert buffer is not None, "overlong=penalty needs overlong_buffer"
    return np.where(is_truncated, -1.0, -np.clip((lengths - (max_response_tokens - buffer)) / buffer, 0.0, 1.0))


def _truncated(group: Group) -> np.ndarray:
    return np.array([sample.completion.finish_reason == "length" for sample in group.samples], dtype=bool)
