"""The loss of multi-token prediction: at depth k, position t predicts the token k places after its label.

Scaled like every other loss: the cross-entropy of a depth is summed over micro-batches, ranks and slices of a sequence and divided by
the number of its targets in the whole mini-batch. DeepSeek-V3 (arXiv:2412.19437, equation 25): the mean over the depths, times a weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moerl.types import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPTargets:
    """What each depth predicts in a mini-batch: the response tokens that have enough tokens before them."""

    batch: TrainBatch
    counts: tuple[int, ...]
    """Targets of depth 1, 2, ... in the whole mini-batch."""

    @classmethod
    def of(cls, batch: TrainBatch, num_depths: int) -> "MTPTargets":
        position_T = np.arange(len(batch.token_ids_T)) - np.repeat(batch.offsets[:-1], batch.lengths)
        return cls(batch=batch, counts=tuple(int((batch.response_mask_T & (position_T > k)).sum()) for k in range(1, num_depths + 1)))

    def columns(self, label_index_T: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [T] targets and bool [T] where there is one. `label_index_T`: places of the labels in the batch, -1 where none is."""
        batch = self.batch
        ends = batch.offsets[1:][np.searchsorted(batch.offsets, np.maximum(label_index_T, 0), side="right") - 1]
        has_target_T = (label_index_T >= 0) & (label_index_T + depth < ends)
        target_T = np.where(has_target_T, label_index_T + depth, 0)
        return batch.token_ids_T[target_T], has_target_T & batch.response_mask_T[target_T]

    def loss(self, logprobs: Sequence[Tensor], label_index_T: np.ndarray) -> Tensor:
        """This micro-batch's share of the mini-batch's loss, with gradient; log-probs [T] of `columns`' targets, depth after depth."""
        shares = []
        for depth, (logp_T, count) in enumerate(zip(logprobs, self.counts, strict=True), start=1):
            mask_T = torch.from_numpy(self.columns(label_index_T, depth)[1]).to(logp_T.device)
            shares.append(torch.where(mask_T, -logp_T, 0.0).sum() / max(count, 1))
        return torch.stack(shares).mean()
