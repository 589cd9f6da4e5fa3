"""Continuous batching: requests wait for a slot, have their prompt computed in chunks, and then decode together.

An iteration is one prefill pass if any admitted prompt is unfinished, else one decode pass: decoding few rows costs about as much as
decoding many, so the batch is filled first. Requests of one prompt that are admitted before its first chunk (a group) share its
computation. Single-threaded; the generation thread owns it.
"""

import heapq
from collections.abc import Iterable
from itertools import islice

import numpy as np
import torch

from moerl.rollout.engines.hf.forward import Forward
from moerl.rollout.engines.hf.sampling import sample
from moerl.rollout.engines.hf.slots import SlotTable
from moerl.rollout.server.engine_core import Prefill, ServerRequest
from moerl.types.completion import Completion
from moerl.types.errors import EngineError, EngineUnavailable


class Scheduler:
    """All requests that are in flight, by request id."""

    def __init__(self, forward: Forward, *, max_context: int):
        num_slots = forward.cache.num_slots
        self._forward = forward
        self._table = SlotTable(num_slots, max_context, forward.vocab_size, forward.routes)
        self._free = list(range(num_slots))  # a heap: the lowest slot first
        self._requests: dict[str, ServerRequest] = {}
        self._waiting: dict[str, ServerRequest] = {}
        self._prefills: list[Prefill] = []
        self._decoding: dict[int, ServerRequest] = {}  # by slot

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._requests) - len(self._waiting)

    def add(self, request: ServerRequest) -> None:
        if request.request_id in self._requests:
            raise EngineError(f"request_id = {request.request_id!r}: is in flight already; ids must be unique on a server")
        self._requests[request.request_id] = self._waiting[request.request_id] = request

    def step(self, version: int, *, admit: bool) -> None:
        """One iteration with the weights of `version`; without `admit` waiting requests keep waiting."""
        if admit and self._waiting and self._free:
            self._admit()
        if self._prefills:
            self._prefill(version)
        elif self._decoding:
            self._decode(version)

    def abort(self, request_ids: Iterable[str] | None, *, waiting: bool = True) -> None:
        """End these requests (None: all) with the tokens they have; `waiting` includes those without a slot. Unknown ids are ignored."""
        for request_id in list(self._requests) if request_ids is None else request_ids:
            request = self._requests.get(request_id)
            if request is not None and (waiting or request.slot >= 0):
                self._finish(request, aborted=True)

    def fail(self, reason: str) -> None:
        """End all requests with EngineUnavailable."""
        for request in list(self._requests.values()):
            self._remove(request)
            request.done(EngineUnavailable(f"{request.request_id}: {reason}"))

    def _admit(self) -> None:
        admitted = []
        joinable = {prefill.prompt_ids.tobytes(): prefill for prefill in self._prefills if prefill.num_done == 0}
        for request in list(islice(self._waiting.values(), len(self._free))):
            del self._waiting[request.request_id]
            request.slot = heapq.heappop(self._free)
            self._table.take(request.slot, len(request.prompt_ids), request.sampling)
            request.prefill = joinable.setdefault(request.prompt_ids.tobytes(), Prefill(prompt_ids=request.prompt_ids))
            if not request.prefill.requests:
                self._prefills.append(request.prefill)
            request.prefill.requests.append(request)
            admitted.append(request.slot)
        self._forward.cache.clear(torch.tensor(admitted))

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
        tokens, logprobs = sample(logits, self._table.draws(slots))
        sound = np.isfinite(logprobs)
        for slot in slots[~sound]:
            self._fail_unsound(self._decoding[int(slot)], version)
        slots = slots[sound]
        finished = self._table.record(slots, tokens[sound], logprobs[sound], version)
        for slot in slots[finished]:
            self._finish(self._decoding[int(slot)], aborted=False)

    def _finish(self, request: ServerRequest, *, aborted: bool) -> None:
        if request.slot < 0:
            outcome = Completion(request_id=request.request_id, token_ids=(), logprobs=(), spans=(), finish_reason="abort")
        else:
            outcome = self._table.completion(request.slot, request.request_id, aborted=aborted)
        self._remove(request)
        request.done(outcome)

    def _fail_unsound(self, request: ServerRequest, version: int) -> None:
        at = int(self._table.num_generated[request.slot])
        self._remove(request)
        reason = f"log-probs at response position {at} are not finite with weights of version {version}: the training has diverged"
        request.done(EngineError(f"{request.request_id}: {reason}"))

    def _remove(self, request: ServerRequest) -> None:
        del self._requests[request.request_id]
        self._waiting.pop(request.request_id, None)
        if request.prefill is not None:
            self._leave(request.prefill, request)
        if request.slot >= 0:
            self._decoding.pop(request.slot, None)
            heapq.heappush(self._free, request.slot)

    def _leave(self, prefill: Prefill, request: ServerRequest) -> None:
        if prefill.requests[0] is request:
            prefill.num_done, prefill.routes = 0, []  # what was computed goes with the slot
        prefill.requests.remove(request)
        if not prefill.requests:
            self._prefills.remove(prefill)
