"""DAPO, arXiv:2503.14476: clip-higher, dynamic sampling, token-level loss, overlong shaping or masking, no KL term."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from moerl.algorithms.advantages import grpo_advantages, scored
from moerl.algorithms.objective import NormalizeBy
from moerl.algorithms.token_losses import ppo_clip
from moerl.config.schema.algorithm_config import DAPOConfig
from moerl.types.groups import Group


@dataclass(frozen=True)
class DAPO:
    config: DAPOConfig
    max_response_tokens: int

    normalize_by: NormalizeBy = "token"
    uses_reference: bool = False

    @property
    def max_attempts(self) -> int:
        return self.config.max_attempts

    def keep(self, group: Group) -> bool:
        """Whether the samples in the mask scored differently *before* shaping.

        The paper's condition is on correctness (section 3.2). After shaping, a group that is right everywhere and long once would
        count as informative and train on length alone.
        """
        rewards = group.rewards_G[self.sample_mask(group)]
        return len(rewards) > 0 and bool((rewards != rewards[0]).any())

    def sample_mask(self, group: Group) -> np.ndarray:
        """With overlong=mask a truncated sample is left out of the loss and of its group's mean and std (section 3.4)."""
        return scored(group) & ~_truncated(group) if self.config.overlong == "mask" else scored(group)

    def rewards(self, group: Group) -> np.ndarray:
        return group.rewards_G + self._overlong_penalty(group) if self.config.overlong == "penalty" else group.rewards_G

    def advantages(self, group: Group) -> np.ndarray:
        return grpo_advantages(self.rewards(group), self.sample_mask(group))

    def token_loss(self, logp_T: Tensor, old_logp_T: Tensor, advantage_T: Tensor, reference_logp_T: Tensor | None) -> tuple[Tensor, Tensor]:
        c = self.config
        return ppo_clip(logp_T, old_logp_T, advantage_T, clip_low=c.clip_low, clip_high=c.clip_high, dual_clip=c.dual_clip)

    def _overlong_penalty(self, group: Group) -> np.ndarray:
        """0 up to max_response_tokens - buffer, then linearly to -1 at max_response_tokens; -1 if truncated (equation 13)."""
        buffer = self.config.overlong_buffer
        assert buffer is not None, "overlong=penalty needs overlong_buffer"
        over_G = group.lengths_G - (self.max_response_tokens - buffer)
        return np.where(_truncated(group), -1.0, -np.clip(over_G / buffer, 0.0, 1.0))


def _truncated(group: Group) -> np.ndarray:
    return np.array([sample.completion.finish_reason == "length" for sample in group.samples], dtype=bool)
