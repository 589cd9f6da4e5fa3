"""Sequences of a step: laid end to end (TrainBatch), or by reference (StoredBatch: small columns, and where the payloads are), of which
each rank lays out those that its micro-batches need.

Axis suffixes: `_T` tokens of one sequence or of a packed batch, `_G` samples of one group.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Protocol, Self

import numpy as np

from moerl.types.kept_vocabulary import KeptVocabulary
from moerl.types.routes import RouteShape, unknown_route
from moerl.types.stored import Payload, Stored, Stream, fetch


class Batch(Protocol):
    """Batch as the trainer asks for it. Implementations: StoredBatch; TrainBatch, which is laid out as a whole."""

    @property
    def num_sequences(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """int64 [num_sequences], prompt and response"""

    @property
    def offsets(self) -> np.ndarray:
        """int64 [num_sequences + 1], where sequences stand in log-probs [T] of the batch"""

    @property
    def response_lengths(self) -> np.ndarray:
        """int64 [num_sequences]"""

    def num_responses_from(self, position: int) -> int:
        """Response tokens with at least `position` tokens of their sequence before them."""

    @property
    def routes_shape(self) -> tuple[int, int] | None:
        """(layers, top_k); None without routes"""

    @property
    def num_servers(self) -> int:
        """Servers are numbered below it where tokens name theirs; 0: they do not"""

    def without_servers(self) -> Self:
        """Batch for a pass of other weights than those that servers had."""

    def without_routes(self) -> Self: ...

    def without_sets(self) -> Self:
        """Batch for log-probs of the whole vocabulary, whatever its tokens were chosen from."""

    def select(self, sequences: "np.ndarray | list[int]") -> Self:
        """The named sequences, in that order."""

    def laid_out(self, sequences: "np.ndarray | list[int]") -> "TrainBatch":
        """The same, as arrays."""


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
    sets: KeptVocabulary | None = None  # of T tokens: entries that top-k and top-p left the server to choose from
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """Sequence i is a segment's prompt and response. Only a rank's own share has payloads on that rank."""

    payloads: tuple[Stored[Payload] | None, ...]
    prompt_lengths: np.ndarray  # int64 [num_sequences]
    response_lengths: np.ndarray  # int64 [num_sequences], tokens that the policy produced
    advantages: np.ndarray  # float32 [num_sequences], of all response tokens
    starts: np.ndarray  # int64 [num_sequences], where the sequence begins in the log-probs below
    fresh: np.ndarray | None = None  # int64 [num_sequences, 2]
    """Number of the server that sampled the last tokens, and how many of them, where it had the weights that the update starts from; else
    -1 and 0."""
    routes: RouteShape | None = None
    """Shape of the model's routes, where payloads bring routes that are used."""
    old_logprobs: Stored[np.ndarray] | Literal["rollout"] | None = None
    """float32 [T] of the whole step, from the trainer before the update; "rollout": those of the payloads."""
    reference_logprobs: Stored[np.ndarray] | None = None
    """float32 [T] of the whole step, from the frozen initial model."""
    token_advantages: Stored[np.ndarray] | None = None
    """float32 [T] of the whole step, in the place of `advantages`."""
    teacher_logprobs: Stored[np.ndarray] | None = None
    """float32 [T] of the whole step, from the teacher that kl_weights is about."""
    kl_weights: np.ndarray | None = None  # float32 [num_sequences]
    """Weight of the distance from the teacher at response tokens of payloads that have none of their own; streams has kl."""
    prompts: tuple[tuple[int, ...], ...] | None = None
    """In the place of those of the payloads, as long as prompt_lengths says."""
    values: Stored[np.ndarray] | None = None
    """float32 [T] of the whole step, a critic's before its update."""
    process: Stored[np.ndarray] | None = None
    """float32 [T] of the whole step, log-prob by a model of outcomes minus its initial weights'; the driver makes credit of it."""
    process_reference: Stored[np.ndarray] | None = None
    """float32 [T] of the whole step, log-prob by the initial weights of the model of outcomes."""
    returns: Stored[np.ndarray] | None = None
    """float32 [T] of the whole step, what the critic is to estimate."""
    replays_sets: bool = False
    """Payloads bring the entries that tokens were chosen from, and the trainer's log-probs are of these."""
    observed: tuple[tuple[tuple[int, int], ...], ...] | None = None
    """Runs of each response's tokens that the policy did not produce: (first, number); None: there are none."""
    observed_lengths: np.ndarray | int = 0  # int64 [num_sequences], their tokens
    streams: frozenset[Stream] = frozenset()
    """Components of the loss that some payload has weights for."""
    proximal: tuple[tuple[tuple[float, int], ...], ...] | None = None
    """Spans of each sequence: (where the old policy lies between server, 0, and policy, 1; tokens), one after the other."""

    @property
    def num_sequences(self) -> int:
        return len(self.payloads)

    @property
    def lengths(self) -> np.ndarray:
        lengths: np.ndarray = self.prompt_lengths + self.response_lengths + self.observed_lengths
        return lengths

    @property
    def offsets(self) -> np.ndarray:
        return _offsets(self.lengths)

    def num_responses_from(self, position: int) -> int:
        after = int(np.maximum(self.lengths - np.maximum(self.prompt_lengths, position), 0).sum())
        for prompt, runs in zip(self.prompt_lengths.tolist(), self.observed or (), strict=False):
            after -= sum(max(0, prompt + first + number - max(prompt + first, position)) for first, number in runs)
        return after

    def response_mask_T(self) -> np.ndarray:
        """bool [T]: the policy produced the token."""
        lengths = np.stack([self.prompt_lengths, self.lengths - self.prompt_lengths], axis=1).ravel()
        mask_T = np.repeat(np.tile([False, True], self.num_sequences), lengths)
        for start, runs in zip((self.offsets[:-1] + self.prompt_lengths).tolist(), self.observed or (), strict=False):
            for first, number in runs:
                mask_T[start + first : start + first + number] = False
        return mask_T

    @property
    def routes_shape(self) -> tuple[int, int] | None:
        return None if self.routes is None else (self.routes.num_layers, self.routes.top_k)

    @property
    def num_servers(self) -> int:
        return 0 if self.fresh is None else int(self.fresh[:, 0].max(initial=-1)) + 1

    def without_servers(self) -> "StoredBatch":
        return replace(self, fresh=None)

    def without_routes(self) -> "StoredBatch":
        return replace(self, routes=None)

    def without_sets(self) -> "StoredBatch":
        return replace(self, replays_sets=False)

    def select(self, sequences: "np.ndarray | list[int]") -> "StoredBatch":
        chosen = np.asarray(sequences, dtype=np.int64)

        def pick(values: tuple[Any, ...] | None) -> Any:
            return None if values is None else tuple(values[i] for i in chosen)

        columns = {name: getattr(self, name)[chosen] for name in ("prompt_lengths", "response_lengths", "advantages", "starts")}
        fresh = None if self.fresh is None else self.fresh[chosen]
        tuples = {name: pick(getattr(self, name)) for name in ("payloads", "observed", "proximal", "prompts")}
        if self.kl_weights is not None:
            columns["kl_weights"] = self.kl_weights[chosen]
        if not isinstance(self.observed_lengths, int):
            columns["observed_lengths"] = self.observed_lengths[chosen]
        return replace(self, fresh=fresh, **tuples, **columns)

    def share(self, sequences: Collection[int]) -> "StoredBatch":
        """With the payloads of these sequences alone."""
        payloads = tuple(payload if i in sequences else None for i, payload in enumerate(self.payloads))
        prompts = None if self.prompts is None else tuple(ids if i in sequences else () for i, ids in enumerate(self.prompts))
        return replace(self, payloads=payloads, prompts=prompts)

    def laid_out(self, sequences: "np.ndarray | list[int]") -> TrainBatch:
        """Waits for the payloads."""
        chosen = self.select(sequences)
        wanted = [payload for payload in chosen.payloads if payload is not None]
        assert len(wanted) == chosen.num_sequences, "a sequence of another data-parallel rank: the plans of driver and rank differ"
        return chosen._laid_out(fetch(wanted))

    def _laid_out(self, payloads: Sequence[Payload]) -> TrainBatch:
        offsets = self.offsets
        num_tokens = int(offsets[-1])
        token_ids_T, response_mask_T = np.zeros(num_tokens, dtype=np.int64), np.zeros(num_tokens, dtype=bool)
        rollout_logprobs_T, advantages_T = np.zeros(num_tokens, dtype=np.float32), np.zeros(num_tokens, dtype=np.float32)
        routes_T = None if self.routes is None else no_routes(num_tokens, self.routes)
        server_T = None if self.fresh is None else np.full(num_tokens, -1, dtype=np.int16)
        proximal_T = None if self.proximal is None else np.zeros(num_tokens, dtype=np.float32)
        sets: list[KeptVocabulary] = []
        weights_T = {stream: np.zeros(num_tokens, dtype=np.float32) for stream in self.streams}
        for index, (payload, (start, end)) in enumerate(zip(payloads, pairwise(offsets.tolist()), strict=True)):
            prompt_ids = payload.prompt_ids if self.prompts is None else self.prompts[index]
            response = slice(start + len(prompt_ids), end)
            sampled = np.arange(response.start, end) if payload.mask is None else response.start + np.flatnonzero(payload.mask)
            token_ids_T[start : response.start] = prompt_ids
            token_ids_T[response] = payload.token_ids
            response_mask_T[sampled] = True
            rollout_logprobs_T[response] = payload.logprobs
            advantages_T[sampled] = self.advantages[index]
            for stream, column_T in weights_T.items():
                if stream in payload.weights:
                    column_T[response] = payload.weights[stream]
                elif stream == "rl":
                    column_T[sampled] = 1
                elif stream == "kl" and self.kl_weights is not None:
                    column_T[sampled] = self.kl_weights[index]
            if self.fresh is not None and server_T is not None:
                server, num_fresh = self.fresh[index]
                server_T[sampled[len(sampled) - num_fresh :]] = server
            if self.proximal is not None and proximal_T is not None:
                places, counts = zip(*self.proximal[index], strict=True)
                proximal_T[sampled] = np.repeat(places, counts)
            if self.replays_sets:
                sets += [KeptVocabulary.unrestricted(len(prompt_ids))]
                sets += [payload.sets if payload.sets is not None else KeptVocabulary.unrestricted(len(payload.token_ids))]
            if routes_T is not None and payload.routes is not None:
                routes_T[start : end - 1] = payload.routes
        old = rollout_logprobs_T if self.old_logprobs == "rollout" else self._column(self.old_logprobs)
        token_advantages_T = self._column(self.token_advantages)
        return TrainBatch(
            token_ids_T=token_ids_T,
            response_mask_T=response_mask_T,
            rollout_logprobs_T=rollout_logprobs_T,
            advantages_T=advantages_T if token_advantages_T is None else token_advantages_T,
            offsets=offsets,
            old_logprobs_T=old,
            proximal_T=proximal_T,
            sets=KeptVocabulary.joined(sets) if self.replays_sets else None,
            **{f"{stream}_weight_T": column_T for stream, column_T in weights_T.items()},
            reference_logprobs_T=self._column(self.reference_logprobs),
            teacher_logprobs_T=self._column(self.teacher_logprobs),
            values_T=self._column(self.values),
            returns_T=self._column(self.returns),
            server_T=server_T,
            routes_T=routes_T,
        )

    def _column(self, stored: Stored[np.ndarray] | None) -> np.ndarray | None:
        if stored is None:
            return None
        whole_T = stored.get()
        pieces = [whole_T[start : start + length] for start, length in zip(self.starts, self.lengths, strict=True)]
        return np.concatenate(pieces or [whole_T[:0]])


def no_routes(num_tokens: int, shape: RouteShape) -> np.ndarray:
    return np.full((num_tokens, shape.num_layers, shape.top_k), unknown_route(shape.dtype), dtype=shape.dtype)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
