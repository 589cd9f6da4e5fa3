"""Group-relative policy optimization, arXiv:2402.03300."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from moerl.algorithms.advantages import grpo_advantages, scored
from moerl.algorithms.objective import NormalizeBy
from moerl.algorithms.token_losses import kl_k3, ppo_clip
from moerl.config.schema.algorithm_config import GRPOConfig
from moerl.types.groups import Group


@dataclass(frozen=True)
class GRPO:
    config: GRPOConfig

    max_attempts = 1

    @property
    def normalize_by(self) -> NormalizeBy:
        return self.config.normalize_by

    @property
    def uses_reference(self) -> bool:
        return self.config.kl_coefficient > 0

    def keep(self, group: Group) -> bool:
        return True

    def sample_mask(self, group: Group) -> np.ndarray:
        return scored(group)

    def rewards(self, group: Group) -> np.ndarray:
        return group.rewards_G

    def advantages(self, group: Group) -> np.ndarray:
        return grpo_advantages(self.rewards(group), self.sample_mask(group))

    def token_loss(self, logp_T: Tensor, old_logp_T: Tensor, advantage_T: Tensor, reference_logp_T: Tensor | None) -> tuple[Tensor, Tensor]:
        c = self.config
        loss_T, clipped_T = ppo_clip(logp_T, old_logp_T, advantage_T, clip_low=c.clip_low, clip_high=c.clip_high, dual_clip=c.dual_clip)
        if self.uses_reference:
            assert reference_logp_T is not None, "kl_coefficient > 0 needs reference log-probs"
            loss_T = loss_T + c.kl_coefficient * kl_k3(logp_T, reference_logp_T)
        return loss_T, clipped_T
