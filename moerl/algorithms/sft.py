"""Supervised fine-tuning as an objective: the negative log-likelihood of the answers, for the warm start."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moerl.algorithms.objective import NormalizeBy


@dataclass(frozen=True)
class SFT:
    normalize_by: NormalizeBy = "token"
    uses_reference: bool = False

    def token_loss(self, logp_T: Tensor, old_logp_T: Tensor, advantage_T: Tensor, reference_logp_T: Tensor | None) -> tuple[Tensor, Tensor]:
        return -logp_T, torch.zeros_like(logp_T, dtype=torch.bool)
