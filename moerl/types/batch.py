"""Sequences of a step, laid end to end.

Axis suffixes: `_T` tokens of one sequence or of a packed batch, `_G` samples of one group.
"""

from dataclasses import dataclass, replace

import numpy as np

from moerl.types.sampling_sets import SamplingSets


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Sequences laid end to end. Sequence i is `[offsets[i], offsets[i + 1])` in every `_T` array.

    Values at token t belong to *that* token (its log-prob was predicted from token t - 1), so prompts hold zeros.
    """

    token_ids_T: np.ndarray  # int64
    response_mask_T: np.ndarray  # bool, True where the policy produced the token
    rollout_logprobs_T: np.ndarray  # float32, from the engine
    advantages_T: np.ndarray  # float32
    offsets: np.ndarray  # int64 [num_sequences + 1]
    old_logprobs_T: np.ndarray | None = None  # float32, from the trainer before the update
    reference_logprobs_T: np.ndarray | None = None  # float32, from the frozen initial model
    teacher_logprobs_T: np.ndarray | None = None  # float32, from the teacher that kl_weight_T is about
    rl_weight_T: np.ndarray | None = None  # float32, factor of the objective's loss; None: 1
    ce_weight_T: np.ndarray | None = None  # float32, weight of the token's cross-entropy, also where the policy did not produce it; None: 0
    kl_weight_T: np.ndarray | None = None  # float32, weight of the distance from the teacher; None: 0
    correction_T: np.ndarray | None = None  # float32, factor of the policy loss that corrections gave before the update
    kept_T: np.ndarray | None = None  # bool, False for what corrections took out; None: True
    bounded_T: np.ndarray | None = None  # bool, a correction's bound was reached
    selected_T: np.ndarray | None = None  # bool, what the objective picked of the mini-batch
    proximal_T: np.ndarray | None = None  # float32, where between server (0) and policy (1) the old policy is, in log-probs
    values_T: np.ndarray | None = None  # float32, a critic's before its update
    returns_T: np.ndarray | None = None  # float32, what the critic is to estimate
    server_T: np.ndarray | None = None  # int16, who sampled it with the weights that the update starts from; -1: other weights, or nobody
    sets: SamplingSets | None = None  # of T tokens: entries that top-k and top-p left the server to choose from
    routes_T: np.ndarray | None = None  # uint8 or uint16 [T, layers, top_k], from the engine; unknown_route where it has none

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def response_lengths(self) -> np.ndarray:
        before_T = np.concatenate([[0], np.cumsum(self.response_mask_T)])
        return before_T[self.offsets[1:]] - before_T[self.offsets[:-1]]

    def num_responses_from(self, position: int) -> int:
        """Response tokens with at least `position` tokens of their sequence before them."""
        position_T = np.arange(len(self.token_ids_T)) - np.repeat(self.offsets[:-1], self.lengths)
        return int((self.response_mask_T & (position_T >= position)).sum())

    @property
    def routes_shape(self) -> tuple[int, int] | None:
        return None if self.routes_T is None else (self.routes_T.shape[1], self.routes_T.shape[2])

    @property
    def num_servers(self) -> int:
        return 0 if self.server_T is None else int(self.server_T.max(initial=-1)) + 1

    def without_servers(self) -> "TrainBatch":
        return replace(self, server_T=None)

    def without_routes(self) -> "TrainBatch":
        return replace(self, routes_T=None)

    def without_sets(self) -> "TrainBatch":
        return replace(self, sets=None)

    def select(self, sequences: "np.ndarray | list[int]") -> "TrainBatch":
        """The named sequences, in that order."""
        spans = [slice(self.offsets[i], self.offsets[i + 1]) for i in sequences]

        def pick(column: np.ndarray | None) -> np.ndarray | None:
            return None if column is None else np.concatenate([column[s] for s in spans] or [column[:0]])

        columns = {name: pick(getattr(self, name)) for name in self.__slots__ if name.endswith("_T")}
        lengths = [s.stop - s.start for s in spans]
        if self.sets is not None:
            columns["sets"] = self.sets.take(np.concatenate([np.arange(s.start, s.stop) for s in spans] or [np.zeros(0, dtype=np.int64)]))  # type: ignore[assignment]
        return TrainBatch(**columns, offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))  # type: ignore[arg-type]

    laid_out = select
