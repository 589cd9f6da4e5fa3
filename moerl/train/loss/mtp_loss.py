"""The loss of multi-token prediction: at depth k, position t predicts the token k places after its label.

Scaled like every other loss: the cross-entropy of a depth is summed over micro-batches, ranks and slices of a sequence and divided by
the number of its targets in the whole mini-batch. DeepSeek-V3 (arXiv:2412.19437, equation 25): the mean over the depths, times a weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moerl.types.batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPLoss:
    """The loss of one mini-batch, micro-batch by micro-batch. Targets of a depth: response tokens that have enough tokens before them."""

    batch: TrainBatch
    """The sequences of this rank."""
    counts: tuple[int, ...]
    """Targets of depth 1, 2, ... in the whole mini-batch."""
    coefficient: float
    logprobs: Callable[[Any, np.ndarray, np.ndarray], tuple[Tensor, Tensor]]
    """From what the output layer makes logits of, targets [T] and where there is one [T] to their log-probs [T] and entropies."""

    def of(self, heads: Sequence[Any], label_index_T: np.ndarray) -> Tensor:
        """This micro-batch's share, with gradient, before the coefficient. `heads`: of depth 1, 2, ..."""
        shares = []
        for depth, (head, count) in enumerate(zip(heads, self.counts, strict=True), start=1):
            target_T, mask_T = self.columns(label_index_T, depth)
            logp_T, _ = self.logprobs(head, target_T, mask_T)
            shares.append(torch.where(torch.from_numpy(mask_T).to(logp_T.device), -logp_T, 0.0).sum() / max(count, 1))
        return torch.stack(shares).mean()

    def columns(self, label_index_T: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [T] targets and bool [T] where there is one. `label_index_T`: places of the labels in the batch, -1 where none is."""
        batch = self.batch
        if batch.num_sequences == 0:  # padding alone
            return np.zeros(len(label_index_T), dtype=np.int64), np.zeros(len(label_index_T), dtype=bool)
        ends = batch.offsets[1:][np.searchsorted(batch.offsets, np.maximum(label_index_T, 0), side="right") - 1]
        has_target_T = (label_index_T >= 0) & (label_index_T + depth < ends)
        target_T = np.where(has_target_T, label_index_T + depth, 0)
        return batch.token_ids_T[target_T], has_target_T & batch.response_mask_T[target_T]
