"""Continuous batching: requests wait for a slot, have their prompt computed in chunks, and then decode together.

An iteration is one prefill pass if any admitted prompt is unfinished, else one decode pass: decoding few rows costs about as much as
decoding many, so the batch is filled first. Single-threaded; the generation thread owns it.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from moerl.rollout.hf.forward import Forward
from moerl.rollout.hf.sampling import sample
from moerl.rollout.hf.slots import SlotTable
from moerl.types import Completion, EngineError, SamplingParams

Outcome = Completion | EngineError


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One completion to be drawn."""

    request_id: str
    prompt_ids: np.ndarray  # int64 [prompt length]
    sampling: SamplingParams
    done: Callable[[Outcome], None]
    """Called once, from the generation thread."""
    slot: int = -1
    num_prefilled: int = 0
    """Prompt tokens whose keys and values are in the slot."""


class Scheduler:
    """All requests that are in flight, by request id."""

    def __init__(self, forward: Forward, *, max_context: int):
        num_slots = forward.cache.num_slots
        self._forward = forward
        self._table = SlotTable(num_slots, max_context, forward.vocab_size)
        self._free = list(range(num_slots))  # a heap: the lowest slot first
        self._requests: dict[str, Request] = {}
        self._waiting: dict[str, Request] = {}
        self._prefilling: dict[str, Request] = {}
        self._decoding: dict[int, Request] = {}  # by slot

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def add(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise EngineError(f"request_id = {request.request_id!r}: is in flight already; ids must be unique on a server")
        self._requests[request.request_id] = self._waiting[request.request_id] = request

    def step(self, version: int, *, admit: bool) -> None:
        """One iteration with the weights of `version`; without `admit` waiting requests keep waiting."""
        if admit and self._waiting and self._free:
            self._admit()
        if self._prefilling:
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
        """End all requests with an EngineError."""
        for request in list(self._requests.values()):
            self._remove(request)
            request.done(EngineError(f"{request.request_id}: {reason}"))

    def _admit(self) -> None:
        admitted = []
        while self._waiting and self._free:
            request = self._waiting.pop(next(iter(self._waiting)))
            request.slot = heapq.heappop(self._free)
            self._table.take(request.slot, len(request.prompt_ids), request.sampling)
            self._prefilling[request.request_id] = request
            admitted.append(request.slot)
        self._forward.cache.clear(torch.tensor(admitted))

    def _prefill(self, version: int) -> None:
        """The next chunk of the oldest prompts; those that end here get their first token."""
        requests = [request for request, _ in zip(self._prefilling.values(), range(self._forward.prefill_rows), strict=False)]
        starts = np.array([request.num_prefilled for request in requests])
        chunk = self._forward.prefill_chunk
        chunks = [request.prompt_ids[start : start + chunk] for request, start in zip(requests, starts, strict=True)]
        logits = self._forward.prefill(np.array([request.slot for request in requests]), chunks, starts)
        complete = []
        for row, request in enumerate(requests):
            request.num_prefilled += len(chunks[row])
            if request.num_prefilled == len(request.prompt_ids):
                self._decoding[request.slot] = self._prefilling.pop(request.request_id)
                complete.append(row)
        if complete:
            self._sample(np.array([requests[row].slot for row in complete]), logits[complete], version)

    def _decode(self, version: int) -> None:
        slots = np.array(sorted(self._decoding))
        tokens, positions = self._table.last_tokens(slots)
        self._sample(slots, self._forward.decode(slots, tokens, positions), version)

    def _sample(self, slots: np.ndarray, logits: torch.Tensor, version: int) -> None:
        tokens, logprobs = sample(logits, self._table.draws(slots))
        sound = np.isfinite(logprobs)
        for slot in slots[~sound]:
            self._fail_unsound(self._decoding[int(slot)], version)
        slots = slots[sound]
        finished = self._table.record(slots, tokens[sound], logprobs[sound], version)
        for slot in slots[finished]:
            self._finish(self._decoding[int(slot)], aborted=False)

    def _finish(self, request: Request, *, aborted: bool) -> None:
        if request.slot < 0:
            outcome = Completion(request_id=request.request_id, token_ids=(), logprobs=(), spans=(), finish_reason="abort")
        else:
            outcome = self._table.completion(request.slot, request.request_id, aborted=aborted)
        self._remove(request)
        request.done(outcome)

    def _fail_unsound(self, request: Request, version: int) -> None:
        at = int(self._table.num_generated[request.slot])
        self._remove(request)
        reason = f"log-probs at response position {at} are not finite with weights of version {version}: the training has diverged"
        request.done(EngineError(f"{request.request_id}: {reason}"))

    def _remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._waiting.pop(request.request_id, None)
        self._prefilling.pop(request.request_id, None)
        if request.slot >= 0:
            self._decoding.pop(request.slot, None)
            heapq.heappush(self._free, request.slot)
