"""A server with a cache of keys and values that is finite, which only waits; as vLLM 0.32 schedules by default.

A token is decoded for every running request in one unit of time. A waiting request begins, first come first served, when a slot and room
for what it has are free. When the next token has no room, the request that began last is preempted: what it has is computed again when it
goes on, at `prefill_rate` tokens per unit of time, in which no request gets a token. Prompts are not shared, their first computation takes
no time, and nothing of a preempted request is found again in the cache.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, replace

from pool import canned

from moerl.types.completion import Completion, SamplingParams, ServerLoad


@dataclass(eq=False)
class _Sequence:
    num_tokens: int
    """In the cache, or to be computed."""
    left: int
    done: "asyncio.Future[None]"
    was_preempted: bool = False


class CachedServer:
    """One that has `num_slots` and a cache of `cache_tokens`; each way over the network takes `latency`. `reports`: how full it is."""

    def __init__(self, name: str, *, num_slots: int, cache_tokens: int, prefill_rate: float, latency: float = 1.0, reports: bool = True):
        self.name, self._reports = name, reports
        self._num_slots, self._cache_tokens, self._prefill_rate, self._latency = num_slots, cache_tokens, prefill_rate, latency
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._at = 0.0  # time up to which tokens are decoded, or what stood still is over
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.num_preempted = self.num_recomputed = self.num_answered = 0
        """Preemptions; tokens computed again, and tokens of answers."""

    @property
    def load(self) -> ServerLoad:
        if not self._reports:
            return ServerLoad()
        return ServerLoad(cache_share=self._used() / self._cache_tokens, num_preempted=self.num_preempted)

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion:
        assert len(prompt_ids) + sampling.max_tokens <= self._cache_tokens, "the longest request must fit alone"
        await asyncio.sleep(self._latency)
        self._task = self._task or asyncio.create_task(self._run())
        sequence = _Sequence(len(prompt_ids), sampling.max_tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(sequence)
        self._changed.set()
        try:
            await sequence.done
        finally:
            for held in (self._running, self._waiting):
                if sequence in held:
                    held.remove(sequence)
        self.num_answered += sampling.max_tokens
        completion = replace(canned(request_id, sampling.max_tokens), load=self.load)
        await asyncio.sleep(self._latency)
        return completion

    def _used(self) -> int:
        return sum(sequence.num_tokens for sequence in self._running)

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self._changed.clear()
            if not self._running:
                self._at = max(self._at, clock())
            if not self._preempt():
                self._begin()
            if not self._running:
                await self._changed.wait()
                continue
            room = (self._cache_tokens - self._used()) // len(self._running)
            steps = min(room, min(sequence.left for sequence in self._running))
            try:
                async with asyncio.timeout_at(self._at + steps):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._decode(min(steps, int(clock() - self._at + 1e-6)))  # the clock may be a rounding short

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self._num_slots:
            if self._used() + self._waiting[0].num_tokens + len(self._running) + 1 > self._cache_tokens:
                return  # with the next token of all
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            if sequence.was_preempted:
                self.num_recomputed += sequence.num_tokens
                self._at += sequence.num_tokens / self._prefill_rate

    def _preempt(self) -> bool:
        """Until the others have room for a token; whether there was need."""
        before = self.num_preempted
        while self._cache_tokens - self._used() < len(self._running):
            sequence = self._running.pop()
            sequence.was_preempted = True
            self._waiting.appendleft(sequence)
            self.num_preempted += 1
        return self.num_preempted > before

    def _decode(self, steps: int) -> None:
        if steps <= 0:
            return
        self._at += steps
        for sequence in list(self._running):
            sequence.num_tokens += steps
            sequence.left -= steps
            if sequence.left == 0:
                self._running.remove(sequence)
                if not sequence.done.done():
                    sequence.done.set_result(None)
