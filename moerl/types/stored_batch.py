"""A step's sequences by reference: small columns, and where the payloads are. Each rank lays out the sequences its micro-batches need."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, Protocol, Self

import numpy as np

from moerl.types.batch import TrainBatch
from moerl.types.routes import RouteShape, unknown_route
from moerl.types.stored import Payload, Stored, fetch


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

    def select(self, sequences: "np.ndarray | list[int]") -> Self:
        """The named sequences, in that order."""

    def laid_out(self, sequences: "np.ndarray | list[int]") -> TrainBatch:
        """The same, as arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """Sequence i is a sample's prompt and response. Only a rank's own share has payloads on that rank."""

    payloads: tuple[Stored[Payload] | None, ...]
    prompt_lengths: np.ndarray  # int64 [num_sequences]
    response_lengths: np.ndarray  # int64 [num_sequences]
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
    proximal: tuple[tuple[tuple[float, int], ...], ...] | None = None
    """Spans of each sequence: (where the old policy lies between server, 0, and policy, 1; tokens), one after the other."""

    @property
    def num_sequences(self) -> int:
        return len(self.payloads)

    @property
    def lengths(self) -> np.ndarray:
        return self.prompt_lengths + self.response_lengths

    @property
    def offsets(self) -> np.ndarray:
        return _offsets(self.lengths)

    def num_responses_from(self, position: int) -> int:
        return int(np.maximum(self.lengths - np.maximum(self.prompt_lengths, position), 0).sum())

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

    def select(self, sequences: "np.ndarray | list[int]") -> "StoredBatch":
        chosen = np.asarray(sequences, dtype=np.int64)
        columns = {name: getattr(self, name)[chosen] for name in ("prompt_lengths", "response_lengths", "advantages", "starts")}
        fresh = None if self.fresh is None else self.fresh[chosen]
        proximal = None if self.proximal is None else tuple(self.proximal[i] for i in chosen)
        return replace(self, payloads=tuple(self.payloads[i] for i in chosen), fresh=fresh, proximal=proximal, **columns)

    def share(self, sequences: Collection[int]) -> "StoredBatch":
        """With the payloads of these sequences alone."""
        return replace(self, payloads=tuple(payload if i in sequences else None for i, payload in enumerate(self.payloads)))

    def laid_out(self, sequences: "np.ndarray | list[int]") -> TrainBatch:
        """Waits for the payloads."""
        chosen = self.select(sequences)
        wanted = [payload for payload in chosen.payloads if payload is not None]
        assert len(wanted) == chosen.num_sequences, "a sequence of another data-parallel rank: the plans of driver and rank differ"
        return chosen._filled(fetch(wanted))

    def _filled(self, payloads: Sequence[Payload]) -> TrainBatch:
        offsets = self.offsets
        num_tokens = int(offsets[-1])
        token_ids_T, response_mask_T = np.zeros(num_tokens, dtype=np.int64), np.zeros(num_tokens, dtype=bool)
        rollout_logprobs_T, advantages_T = np.zeros(num_tokens, dtype=np.float32), np.zeros(num_tokens, dtype=np.float32)
        routes_T = None if self.routes is None else no_routes(num_tokens, self.routes)
        server_T = None if self.fresh is None else np.full(num_tokens, -1, dtype=np.int16)
        proximal_T = None if self.proximal is None else np.zeros(num_tokens, dtype=np.float32)
        for index, (payload, (start, end)) in enumerate(zip(payloads, pairwise(offsets.tolist()), strict=True)):
            response = slice(start + len(payload.prompt_ids), end)
            token_ids_T[start : response.start] = payload.prompt_ids
            token_ids_T[response] = payload.token_ids
            response_mask_T[response] = True
            rollout_logprobs_T[response] = payload.logprobs
            advantages_T[response] = self.advantages[index]
            if self.fresh is not None and server_T is not None:
                server, num_fresh = self.fresh[index]
                server_T[end - num_fresh : end] = server
            if self.proximal is not None and proximal_T is not None:
                places, counts = zip(*self.proximal[index], strict=True)
                proximal_T[response] = np.repeat(places, counts)
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
            reference_logprobs_T=self._column(self.reference_logprobs),
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
