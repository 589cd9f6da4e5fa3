"""Sequences of a batch to the row of one micro-batch and back: pure functions over numpy. micro_batch_plan.py chooses the sequences.

Invariants, by the names of their tests:
* round_trip: `unpack_scores` puts every label's value at its token.
* zigzag_is_even: every context-parallel rank has as many tokens of a sequence, and its causal attention costs the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np

from moerl.train.batching.micro_batch_plan import round_up
from moerl.types.batch import TrainBatch
from moerl.types.kept_vocabulary import KeptVocabulary
from moerl.types.routes import unknown_route


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicroBatch:
    """Sequences end to end in one row of T tokens, each in a slot of its padded length, and one sequence of padding at the end.

    Columns with a label's value stand where the label is predicted: position t holds what belongs to token t + 1 of its sequence.
    The last token of a sequence and padding predict nothing: label 0, mask False, values 0.
    """

    token_ids_T: np.ndarray  # int64
    position_ids_T: np.ndarray  # int64, from 0 in every slot
    is_token_T: np.ndarray  # bool, False for padding
    labels_T: np.ndarray  # int64
    label_index_T: np.ndarray  # int64, where the label stands in the batch's `_T` arrays; -1: no label
    response_mask_T: np.ndarray  # bool, the label is a response token
    response_tokens_T: np.ndarray  # int64, response tokens of the whole sequence that are trained on; 0 where there is no label
    sequence_T: np.ndarray  # int64, number of the slot
    rollout_logprobs_T: np.ndarray  # float32
    advantages_T: np.ndarray  # float32
    old_logprobs_T: np.ndarray | None  # float32
    reference_logprobs_T: np.ndarray | None  # float32
    teacher_logprobs_T: np.ndarray | None  # float32
    rl_weight_T: np.ndarray | None  # float32, as the next two
    ce_weight_T: np.ndarray | None
    kl_weight_T: np.ndarray | None
    correction_T: np.ndarray | None  # float32
    kept_T: np.ndarray | None  # bool
    bounded_T: np.ndarray | None  # bool
    selected_T: np.ndarray | None  # bool
    proximal_T: np.ndarray | None  # float32
    values_T: np.ndarray | None  # float32
    returns_T: np.ndarray | None  # float32
    server_T: np.ndarray | None  # int16; -1: not to be compared
    sets: KeptVocabulary | None  # of T labels: entries that each was chosen from
    routes_T: np.ndarray | None  # uint8 or uint16 [T, layers, top_k], of the token that stands there
    cu_seqlens: np.ndarray  # int32 [num_slots + 1], from 0 to the tokens of the whole micro-batch
    max_seqlen: int
    num_padding: int  # of the whole micro-batch
    members: tuple[int, ...]  # sequences of the batch, in order
    kept_routes: np.ndarray | None = None  # [T / tp, layers of this rank, top_k], which the rank noted in an earlier pass

    @property
    def num_slots(self) -> int:
        """Sequences, and the padding at the end if there is any."""
        return len(self.cu_seqlens) - 1

    @property
    def asked_T(self) -> np.ndarray:
        """bool [T]: labels whose log-prob a loss may ask about; tokens of a response, and others that are taught."""
        weights = (self.ce_weight_T, self.kl_weight_T)
        return np.logical_or.reduce([self.response_mask_T, *(weight_T != 0 for weight_T in weights if weight_T is not None)])

    @property
    def num_positions(self) -> int:
        """Tokens of the whole micro-batch, padding included."""
        return int(self.cu_seqlens[-1])

    def part_of(self, rank: int, num_ranks: int) -> "PackedMicroBatch":
        """The tokens of one context-parallel rank; the bounds and counts stay those of the whole."""
        if num_ranks == 1:
            return self
        mine = zigzag_positions(self.cu_seqlens, rank, num_ranks)
        columns = {c.name: getattr(self, c.name) for c in fields(self) if c.name.endswith("_T")}
        sets = None if self.sets is None else self.sets.take(mine)
        return replace(self, sets=sets, **{name: column[mine] for name, column in columns.items() if column is not None})


def zigzag_positions(cu_seqlens: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
    """int64 [T / num_ranks]: of each sequence cut into 2 * num_ranks chunks, chunk `rank` and the one as far from the end.

    Causal attention costs the same on every rank then. Transformer Engine's and Megatron's order: megatron/core/utils.py,
    get_batch_on_this_cp_rank. Sequences must be multiples of 2 * num_ranks.
    """
    pieces = []
    for start, end in pairwise(cu_seqlens.tolist()):
        chunk = (end - start) // (2 * num_ranks)
        for index in (rank, 2 * num_ranks - 1 - rank):
            pieces.append(np.arange(start + index * chunk, start + (index + 1) * chunk))
    return np.concatenate(pieces)


def pack(batch: TrainBatch, indices: Sequence[int], token_multiple: int, sequence_multiple: int = 1) -> PackedMicroBatch:
    """The named sequences as one row; no sequences give one dummy sequence of padding, so that the rank still runs."""
    chosen = np.asarray(indices, dtype=np.int64)
    starts, lengths = batch.offsets[chosen], batch.lengths[chosen]
    slots = round_up(lengths, sequence_multiple)
    num_tokens = round_up(max(int(slots.sum()), 2), token_multiple)
    boundaries = np.concatenate([[0], np.cumsum(slots)])
    if boundaries[-1] < num_tokens:
        boundaries = np.append(boundaries, num_tokens)

    trained_T = batch.response_mask_T if batch.kept_T is None else batch.response_mask_T & batch.kept_T
    source_T = np.full(num_tokens, -1, dtype=np.int64)
    label_index_T = np.full(num_tokens, -1, dtype=np.int64)
    response_tokens_T = np.zeros(num_tokens, dtype=np.int64)
    for slot, start, length in zip(boundaries[: len(starts)], starts, lengths, strict=True):
        source_T[slot : slot + length] = np.arange(start, start + length)
        label_index_T[slot : slot + length - 1] = np.arange(start + 1, start + length)
        response_tokens_T[slot : slot + length - 1] = trained_T[start : start + length].sum()
    return PackedMicroBatch(
        token_ids_T=_gather(batch.token_ids_T, source_T),
        position_ids_T=np.arange(num_tokens) - np.repeat(boundaries[:-1], np.diff(boundaries)),
        is_token_T=source_T >= 0,
        labels_T=_gather(batch.token_ids_T, label_index_T),
        label_index_T=label_index_T,
        response_mask_T=_gather(batch.response_mask_T, label_index_T),
        response_tokens_T=response_tokens_T,
        rollout_logprobs_T=_gather(batch.rollout_logprobs_T, label_index_T),
        advantages_T=_gather(batch.advantages_T, label_index_T),
        sequence_T=np.repeat(np.arange(len(boundaries) - 1), np.diff(boundaries)),
        **{name: None if (column := getattr(batch, name)) is None else _gather(column, label_index_T) for name in _OF_LABELS},
        server_T=None if batch.server_T is None else _gather(batch.server_T, label_index_T, fill=-1),
        sets=None if batch.sets is None else batch.sets.take(label_index_T),
        routes_T=None if batch.routes_T is None else _gather(batch.routes_T, source_T, fill=unknown_route(batch.routes_T.dtype)),
        cu_seqlens=boundaries.astype(np.int32),
        max_seqlen=int(np.diff(boundaries).max()),
        num_padding=int((source_T < 0).sum()),
        members=tuple(map(int, indices)),
    )


_OF_LABELS = (
    "old_logprobs_T", "reference_logprobs_T", "teacher_logprobs_T", "rl_weight_T", "ce_weight_T", "kl_weight_T", "correction_T", "kept_T",
    "bounded_T", "selected_T", "proximal_T", "values_T", "returns_T",
)  # fmt: skip
"""Columns of a batch that it may lack, gathered for labels with 0 where there is none."""


def unpack_scores(pieces: Iterable[tuple[PackedMicroBatch, np.ndarray]], batch: TrainBatch, *, dtype: str = "float32") -> np.ndarray:
    """`dtype` [T] like `batch.token_ids_T`, from log-probs at the label positions of micro-batches packed from `batch`.

    First tokens, which nothing predicts, and sequences in no piece hold 0; the results of different ranks therefore add up.
    """
    logprobs_T = np.zeros(len(batch.token_ids_T), dtype=dtype)
    for packed, values_T in pieces:
        labelled_T = packed.label_index_T >= 0
        logprobs_T[packed.label_index_T[labelled_T]] = values_T[labelled_T]
    return logprobs_T


def _gather(column: np.ndarray, index_T: np.ndarray, *, fill: int = 0) -> np.ndarray:
    gathered_T = np.full((len(index_T), *column.shape[1:]), fill, dtype=column.dtype)
    gathered_T[index_T >= 0] = column[index_T[index_T >= 0]]
    return gathered_T
