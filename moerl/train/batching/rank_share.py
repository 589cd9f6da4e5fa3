"""Which sequences of a batch a data-parallel rank needs, on the driver, and those sequences laid out, on the rank.

Both sides make the same plan from the lengths, so that a rank is sent the payloads of its own micro-batches and of no others.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from moerl.train.batching.micro_batch_plan import Bins, MicroBatchPlanner
from moerl.train.batching.packed_sequences import PackedMicroBatch
from moerl.types.batch import Batch, StoredBatch, TrainBatch


def shares(batch: StoredBatch, planner: MicroBatchPlanner, num_updates: int) -> list[StoredBatch]:
    """Batch for each data-parallel rank with the payloads of its sequences, if it is processed in `num_updates` mini-batches."""
    plan = planner.plan_step(batch.lengths, num_updates)
    return [batch.share({member for members in bins for member in members}) for bins in plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The micro-batches of one data-parallel rank in a (mini-)batch."""

    batch: TrainBatch
    """Its sequences alone, in the order of `sequences`."""
    sequences: np.ndarray
    """int64, where they stand in the whole batch."""
    bins: Bins
    """Indices for each micro-batch: which of `sequences`."""

    @classmethod
    def of(cls, whole: Batch, bins: Bins) -> "Share":
        """`bins`: sequences of `whole` for each micro-batch of the rank."""
        sequences = np.array(sorted(member for members in bins for member in members), dtype=np.int64)
        place = {int(sequence): index for index, sequence in enumerate(sequences)}
        return cls(batch=whole.laid_out(sequences), sequences=sequences, bins=[[place[member] for member in members] for members in bins])

    def spread(self, values_T: np.ndarray, whole: Batch) -> np.ndarray:
        """`values_T` [T of the share] at their places in the whole batch, 0 elsewhere."""
        offsets = whole.offsets
        spread_T = np.zeros(int(offsets[-1]), dtype=values_T.dtype)
        for index, sequence in enumerate(self.sequences):
            start, end = self.batch.offsets[index : index + 2]
            spread_T[offsets[sequence] : offsets[sequence + 1]] = values_T[start:end]
        return spread_T

    def gathered(self, values_T: np.ndarray, whole: Batch) -> np.ndarray:
        """[T of the share], from `values_T` [T of the whole batch]."""
        offsets = whole.offsets
        pieces = [values_T[offsets[sequence] : offsets[sequence + 1]] for sequence in self.sequences]
        return np.concatenate(pieces or [values_T[:0]])

    def named(self, micro: PackedMicroBatch, samples: np.ndarray) -> PackedMicroBatch:
        """With its members by their names: `samples` [sequences of the whole batch]."""
        return replace(micro, members=tuple(int(samples[self.sequences[member]]) for member in micro.members))

    def repacking(self, pack: Callable[[list[int]], PackedMicroBatch], samples: np.ndarray) -> Callable[..., PackedMicroBatch]:
        """A function of names of own sequences, to the micro-batch of just these."""
        place = {int(samples[sequence]): index for index, sequence in enumerate(self.sequences)}
        return lambda chosen: self.named(pack([place[sample] for sample in chosen]), samples)
