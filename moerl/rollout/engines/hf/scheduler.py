"""Continuous batching: requests wait for a slot, have their prompt computed in chunks, and then decode together.

An iteration is one prefill pass or one decode pass. Either costs about as much with few rows as with many, so prompts wait until a pass
is worth what it costs those that decode meanwhile. Requests of one prompt that are admitted before its first chunk (a group) share its
computation. Single-threaded; the generation thread owns it.
"""

import heapq
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from moerl.rollout.engines.hf.forward import Forward
from moerl.rollout.engines.hf.sampling import Draws, sample, uniforms
from moerl.rollout.server.contract import runs_of
from moerl.types.completion import Completion, FinishReason, SamplingParams
from moerl.types.kept_vocabulary import KeptVocabulary
from moerl.types.routes import RouteShape

MOST_PUT_OFF = 8
"""Iterations that a prompt waits for others, at most: near the optimum for answers of 10 to 100 tokens, and nothing beside longer ones."""


class SlotTable:
    """The state of all running requests as arrays, one row per slot: what an iteration touches is touched for all rows at once. Row i is
    meaningful while slot i is taken."""

    def __init__(self, num_slots: int, max_context: int, vocab_size: int, routes: RouteShape | None = None):
        self.prompt_length = np.zeros(num_slots, dtype=np.int64)
        self.num_generated = np.zeros(num_slots, dtype=np.int64)
        self._max_tokens = np.zeros(num_slots, dtype=np.int64)
        self._temperature = np.zeros(num_slots)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.zeros(num_slots)
        self._filtered = np.zeros(num_slots, dtype=bool)
        self._sets: dict[int, tuple[array[int], array[int]]] = {}  # by slot, of those that want them: entries, and each token's number
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
        self._filtered[slot] = sampling.filtered
        self._sets.pop(slot, None)
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
            filtered=self._filtered[slots],
            uniform=self._uniforms[slots, self.num_generated[slots]],
        )

    def record(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> np.ndarray:
        """Append one token to each of `slots`; True for those that are finished now."""
        at = self.num_generated[slots]
        self._tokens[slots, at], self._logprobs[slots, at], self._versions[slots, at] = tokens, logprobs, version
        self.num_generated[slots] = at + 1
        return self._stops[slots, tokens] | (at + 1 == self._max_tokens[slots])

    def record_sets(self, slots: np.ndarray, sets: KeptVocabulary) -> None:
        """Entries from which each of `slots` chose its newest token."""
        for slot, first, end in zip(slots.tolist(), sets.offsets[:-1].tolist(), sets.offsets[1:].tolist(), strict=True):
            if self._filtered[slot]:
                ids, counts = self._sets.setdefault(slot, (array("i"), array("i")))
                ids.frombytes(sets.ids[first:end].tobytes())
                counts.append(end - first)

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
            sets=KeptVocabulary.of_counts(*(np.array(each) for each in self._sets.pop(slot))) if count and slot in self._sets else None,
        )


@dataclass(eq=False, slots=True, kw_only=True)
class SlotRequest:
    """One completion to be drawn."""

    key: str
    prompt_ids: np.ndarray  # int64 [prompt length]
    sampling: SamplingParams
    done: Callable[[Completion | Exception], None]
    """Called once, from the generation thread; an exception is the request's own."""
    slot: int = -1
    prefill: "Prefill | None" = None
    """Until its prompt is computed."""


@dataclass(eq=False, slots=True, kw_only=True)
class Prefill:
    """A prompt whose keys and values are being computed in the slot of the first of `requests`; the others get a copy."""

    prompt_ids: np.ndarray  # int64 [prompt length]
    requests: list[SlotRequest] = field(default_factory=list)
    num_done: int = 0
    """Prompt tokens."""
    num_put_off: int = 0
    """Iterations that it has waited for others."""
    routes: list[np.ndarray] = field(default_factory=list)
    """Routes of the tokens done, chunk by chunk, if a request wants them."""

    @property
    def wants_routes(self) -> bool:
        return any(request.sampling.returns_routes for request in self.requests)


class Scheduler:
    """All requests that are in flight, by key."""

    def __init__(self, forward: Forward, *, max_context: int):
        num_slots = forward.cache.num_slots
        self._forward = forward
        self._num_positions = num_slots * max_context
        self._table = SlotTable(num_slots, max_context, forward.vocab_size, forward.routes)
        self._free = list(range(num_slots))  # a heap: the lowest slot first
        self._requests: dict[str, SlotRequest] = {}
        self._waiting: dict[str, SlotRequest] = {}
        self._prefills: list[Prefill] = []
        self._decoding: dict[int, SlotRequest] = {}  # by slot
        self.cache_share = 0.0
        """Share of the cache's positions that running requests fill, after the last iteration or abort; any thread may ask."""

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, requests: Iterable[SlotRequest]) -> None:
        """Those that find no slot wait for one."""
        for request in requests:
            self._requests[request.key] = self._waiting[request.key] = request

    def step(self, version: int) -> None:
        """One iteration with the weights of `version`."""
        if self._waiting and self._free:
            self._admit()
        if self._prefills and self._is_worth_a_pass():
            self._prefill(version)
        elif self._decoding:
            for prefill in self._prefills:
                prefill.num_put_off += 1
            self._decode(version)
        self._note_share()

    def abort(self, key: str) -> None:
        """End this request, if it is in flight, with the tokens it has."""
        if key in self._requests:
            self._finish(self._requests[key], aborted=True)
            self._note_share()  # there may be no iteration after it

    def _admit(self) -> None:
        admitted = []
        joinable = {prefill.prompt_ids.tobytes(): prefill for prefill in self._prefills if prefill.num_done == 0}
        for request in list(islice(self._waiting.values(), len(self._free))):
            del self._waiting[request.key]
            request.slot = heapq.heappop(self._free)
            try:
                self._table.take(request.slot, len(request.prompt_ids), request.sampling)
            except Exception as error:  # numbers that no limit has foreseen end the request, not the process and all others
                self._remove(request)
                request.done(error)
                continue
            request.prefill = joinable.setdefault(request.prompt_ids.tobytes(), Prefill(prompt_ids=request.prompt_ids))
            if not request.prefill.requests:
                self._prefills.append(request.prefill)
            request.prefill.requests.append(request)
            admitted.append(request.slot)
        self._forward.cache.clear(torch.tensor(admitted, dtype=torch.int64))

    def _is_worth_a_pass(self) -> bool:
        """Whether prompts are computed now, which costs each that decodes a token, or wait for others to share the pass. They have waited
        long enough when they have lost as many tokens, with that of this iteration."""
        oldest = self._prefills[0]
        return (
            sum((prefill.num_put_off + 1) * len(prefill.requests) for prefill in self._prefills) >= len(self._decoding)
            or oldest.num_put_off >= MOST_PUT_OFF
            or len(self._prefills) >= self._forward.prefill_rows
            or oldest.num_done > 0
            or any(request.sampling.goes_first for prefill in self._prefills for request in prefill.requests)
        )

    def _note_share(self) -> None:
        slots = [request.slot for request in self._requests.values() if request.slot >= 0]
        self.cache_share = float((self._table.prompt_length[slots] + self._table.num_generated[slots]).sum() / self._num_positions)

    def _prefill(self, version: int) -> None:
        """The next chunk of the oldest prompts; the requests of those that end here get their first token."""
        prefills = self._prefills[: self._forward.prefill_rows]
        starts = np.array([prefill.num_done for prefill in prefills])
        size = self._forward.prefill_chunk
        chunks = [prefill.prompt_ids[start : start + size] for prefill, start in zip(prefills, starts, strict=True)]
        first_slots = np.array([prefill.requests[0].slot for prefill in prefills])
        passed = self._forward.prefill(first_slots, chunks, starts, with_routes=any(prefill.wants_routes for prefill in prefills))
        slots, rows = [], []
        for row, prefill in enumerate(prefills):
            prefill.num_done += len(chunks[row])
            if passed.routes is not None:
                prefill.routes.append(passed.routes[row, : len(chunks[row])])
            if prefill.num_done == len(prefill.prompt_ids):
                slots += self._end_prefill(prefill)
                rows += [row] * len(prefill.requests)
        if slots:
            self._sample(np.array(slots), passed.logits[rows], version)

    def _end_prefill(self, prefill: Prefill) -> list[int]:
        """Its requests go on to decoding; their slots."""
        self._prefills.remove(prefill)
        slots = [request.slot for request in prefill.requests]
        self._forward.cache.copy(slots[0], torch.tensor(slots[1:], dtype=torch.int64), len(prefill.prompt_ids))
        for request in prefill.requests:
            request.prefill = None
            self._decoding[request.slot] = request
            if request.sampling.returns_routes:
                self._table.take_routes(request.slot, np.concatenate(prefill.routes))
        return slots

    def _decode(self, version: int) -> None:
        slots = np.array(sorted(self._decoding))
        tokens, positions = self._table.last_tokens(slots)
        wants_routes = any(request.sampling.returns_routes for request in self._decoding.values())
        passed = self._forward.decode(slots, tokens, positions, with_routes=wants_routes)
        if passed.routes is not None:
            self._table.record_routes(slots, positions, passed.routes[:, 0])
        self._sample(slots, passed.logits, version)

    def _sample(self, slots: np.ndarray, logits: torch.Tensor, version: int) -> None:
        tokens, logprobs, sets = sample(logits, self._table.draws(slots))
        if sets is not None:
            self._table.record_sets(slots, sets)
        finished = self._table.record(slots, tokens, logprobs, version)
        for slot in slots[finished | ~np.isfinite(logprobs)]:  # nothing can follow such a log-prob, and nobody will take it
            self._finish(self._decoding[int(slot)], aborted=False)

    def _finish(self, request: SlotRequest, *, aborted: bool) -> None:
        if request.slot < 0:
            completion = Completion(request_id=request.key, token_ids=(), logprobs=(), spans=(), finish_reason="abort")
        else:
            completion = self._table.completion(request.slot, request.key, aborted=aborted)
        self._remove(request)
        request.done(completion)

    def _remove(self, request: SlotRequest) -> None:
        del self._requests[request.key]
        self._waiting.pop(request.key, None)
        if (prefill := request.prefill) is not None:
            if prefill.requests[0] is request:
                prefill.num_done, prefill.routes = 0, []  # what was computed goes with the slot
            prefill.requests.remove(request)
            if not prefill.requests:
                self._prefills.remove(prefill)
        if request.slot >= 0:
            self._decoding.pop(request.slot, None)
            heapq.heappush(self._free, request.slot)
