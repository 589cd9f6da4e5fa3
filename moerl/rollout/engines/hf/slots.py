"""The state of all running requests as arrays, one row per slot: what an iteration touches is touched for all rows at once."""

import numpy as np

from moerl.rollout.engines.hf.sampling import Draws, uniforms
from moerl.rollout.server.contract import runs_of
from moerl.types.completion import Completion, FinishReason, SamplingParams
from moerl.types.routes import RouteShape


class SlotTable:
    """Row i is meaningful while slot i is taken."""

    def __init__(self, num_slots: int, max_context: int, vocab_size: int, routes: RouteShape | None = None):
        self.prompt_length = np.zeros(num_slots, dtype=np.int64)
        self.num_generated = np.zeros(num_slots, dtype=np.int64)
        self._max_tokens = np.zeros(num_slots, dtype=np.int64)
        self._temperature = np.zeros(num_slots)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.zeros(num_slots)
        self._stops = np.zeros((num_slots, vocab_size), dtype=bool)
        self._uniforms = np.zeros((num_slots, max_context))
        self._tokens = np.zeros((num_slots, max_context), dtype=np.int64)
        self._logprobs = np.zeros((num_slots, max_context))
        self._versions = np.zeros((num_slots, max_context), dtype=np.int64)
        self._route_shape = routes
        self._routes: dict[int, np.ndarray] = {}  # by slot, of those that want them: [prompt + max_tokens, layers, top_k]

    def take(self, slot: int, prompt_length: int, sampling: SamplingParams) -> None:
        self.prompt_length[slot], self.num_generated[slot], self._max_tokens[slot] = prompt_length, 0, sampling.max_tokens
        self._temperature[slot], self._top_k[slot], self._top_p[slot] = sampling.temperature, sampling.top_k, sampling.top_p
        self._stops[slot] = False
        self._stops[slot, list(sampling.stop_token_ids)] = True
        self._uniforms[slot, : sampling.max_tokens] = uniforms(sampling.seed, sampling.num_drawn + sampling.max_tokens)[
            sampling.num_drawn :
        ]
        self._routes.pop(slot, None)

    def draws(self, slots: np.ndarray) -> Draws:
        """Draws of the next token of each of `slots`."""
        return Draws(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            uniform=self._uniforms[slots, self.num_generated[slots]],
        )

    def record(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> np.ndarray:
        """Append one token to each of `slots`; True for those that are finished now."""
        at = self.num_generated[slots]
        self._tokens[slots, at], self._logprobs[slots, at], self._versions[slots, at] = tokens, logprobs, version
        self.num_generated[slots] = at + 1
        return self._stops[slots, tokens] | (at + 1 == self._max_tokens[slots])

    def take_routes(self, slot: int, prompt_routes: np.ndarray) -> None:
        """Routes of the prompt of `slot`; from now on those of its tokens are kept too."""
        assert self._route_shape is not None, "limits refuse the request"
        length = self.prompt_length[slot] + self._max_tokens[slot]
        self._routes[slot] = np.zeros((length, self._route_shape.num_layers, self._route_shape.top_k), dtype=self._route_shape.dtype)
        self._routes[slot][: len(prompt_routes)] = prompt_routes

    def record_routes(self, slots: np.ndarray, positions: np.ndarray, routes: np.ndarray) -> None:
        """[n, layers, top_k] of the tokens at `positions` [n] of `slots` [n]; of slots that do not want them they are passed over."""
        for slot, position, route in zip(slots.tolist(), positions.tolist(), routes, strict=True):
            if slot in self._routes:
                self._routes[slot][position] = route

    def last_tokens(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The token that each of `slots` feeds to the model next, and its position in the sequence."""
        at = self.num_generated[slots] - 1
        return self._tokens[slots, at], self.prompt_length[slots] + at

    def completion(self, slot: int, request_id: str, *, aborted: bool) -> Completion:
        count = int(self.num_generated[slot])
        stopped = count > 0 and bool(self._stops[slot, self._tokens[slot, count - 1]])
        reason: FinishReason = "abort" if aborted else "stop" if stopped else "length"
        return Completion(
            request_id=request_id,
            token_ids=tuple(self._tokens[slot, :count].tolist()),
            logprobs=tuple(self._logprobs[slot, :count].tolist()),
            spans=runs_of(self._versions[slot, :count].tolist()),
            finish_reason=reason,
            routes=self._routes[slot][: self.prompt_length[slot] + count - 1] if count and slot in self._routes else None,
        )
