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


def spans(offsets: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    """int64, every place of these sequences, which begin at `offsets`."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(*offsets[sequence : sequence + 2]) for sequence in sequences)])


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
        spread_T = np.zeros(int(whole.offsets[-1]), dtype=values_T.dtype)
        spread_T[self._places(whole)] = values_T
        return spread_T

    def gathered(self, values_T: np.ndarray, whole: Batch) -> np.ndarray:
        """[T of the share], from `values_T` [T of the whole batch]."""
        return values_T[self._places(whole)]

    def _places(self, whole: Batch) -> np.ndarray:
        """int64 [T of the share], in the whole batch."""
        return spans(whole.offsets, self.sequences)

    def named(self, micro: PackedMicroBatch, samples: np.ndarray) -> PackedMicroBatch:
        """With its members by their names: `samples` [sequences of the whole batch]."""
        return replace(micro, members=tuple(int(samples[self.sequences[member]]) for member in micro.members))

    def repacking(self, pack: Callable[[list[int]], PackedMicroBatch], samples: np.ndarray) -> Callable[..., PackedMicroBatch]:
        """A function of names of own sequences, to the micro-batch of just these."""
        place = {int(samples[sequence]): index for index, sequence in enumerate(self.sequences)}
        return lambda chosen: self.named(pack([place[sample] for sample in chosen]), samples)
