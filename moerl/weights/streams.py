"""All trainer ranks' buckets on their way at once: each rank fills a bucket while its readers install the one before.

Ranks stay close to each other in the order of the schedule, or where there is none of tensors' names, so that a reader does not hold the
pieces of many tensors that others have yet to complete. After the first failure nothing more is begun, what has begun gets some time to
end, and everything that failed until then is told together.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from moerl.push_types import Bucket
from moerl.types import WeightError
from moerl.weights.deliveries import Job
from moerl.weights.send import NUM_BUFFERS

T = TypeVar("T")

FAILED_SIDE = "\n* "
"""Begins what each failed side says, in the text of an error of a push."""

_AHEAD = 2 * NUM_BUFFERS
"""How many buckets, times the number of ranks that send, may be packed after the first that is not installed."""


class Streams:
    """Of one push."""

    def __init__(
        self,
        jobs: Mapping[int, Job],
        pack: Callable[[int, int], Awaitable[Bucket]],
        install: Callable[[Bucket], Awaitable[None]],
        *,
        settle_seconds: float,
    ):
        """`pack(rank, index)`; `install` returns when all readers have installed."""
        self._jobs, self._pack, self._install, self._settle_seconds = jobs, pack, install, settle_seconds
        # A merge keeps the order of every job, whatever the key, so the first bucket in the order can always be packed next.
        merged = heapq.merge(*jobs.values(), key=lambda bucket: (bucket.round, bucket.readers, bucket.entries[0].name, bucket.index))
        self._order = [(bucket.sender, bucket.index) for bucket in merged]
        self._places = {bucket: place for place, bucket in enumerate(self._order)}
        self._installed: set[tuple[int, int]] = set()
        self._num_done = 0  # from the first in the order on, without a gap
        self._errors: list[Exception] = []
        self._failed, self._moved = asyncio.Event(), asyncio.Condition()

    async def run(self) -> list[Bucket]:
        """What was packed. Raises an error that is no WeightError as it is, as it is nearest to the cause; else one WeightError."""
        streams = asyncio.gather(*(self._stream(rank, len(job)) for rank, job in self._jobs.items()))
        failing = asyncio.ensure_future(self._failed.wait())
        both: set[asyncio.Future[Any]] = {streams, failing}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not streams.done():
                await asyncio.wait({streams}, timeout=self._settle_seconds)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        if self._errors:
            raise self._cause()
        return [bucket for buckets in streams.result() for bucket in buckets]

    async def _stream(self, rank: int, num_buckets: int) -> list[Bucket]:
        packed: list[Bucket] = []
        installing: deque[asyncio.Task[None]] = deque()
        try:
            while len(packed) < num_buckets and not self._errors:
                if len(installing) == NUM_BUFFERS:
                    await installing.popleft()
                elif not self._is_near(rank, len(packed)):
                    async with self._moved:
                        await self._moved.wait_for(lambda: self._errors or self._is_near(rank, len(packed)))
                elif (bucket := await self._guarded(self._pack(rank, len(packed)))) is not None:
                    packed.append(bucket)
                    installing.append(asyncio.create_task(self._install_one(bucket)))
            await asyncio.gather(*installing)
        finally:
            for task in installing:
                task.cancel()
            await asyncio.gather(*installing, return_exceptions=True)
        return packed

    def _is_near(self, rank: int, index: int) -> bool:
        return self._places[rank, index] < self._num_done + _AHEAD * len(self._jobs)

    async def _install_one(self, bucket: Bucket) -> None:
        await self._guarded(self._install(bucket))
        self._installed.add((bucket.sender, bucket.index))
        while self._num_done < len(self._order) and self._order[self._num_done] in self._installed:
            self._num_done += 1
        async with self._moved:
            self._moved.notify_all()

    async def _guarded(self, call: Awaitable[T]) -> T | None:
        try:
            return await call
        except Exception as error:  # told by run, with the others
            self._errors.append(error)
            self._failed.set()
            async with self._moved:
                self._moved.notify_all()
            return None

    def _cause(self) -> Exception:
        first = next((error for error in self._errors if not isinstance(error, WeightError)), None)
        if first is not None or len(self._errors) == 1:
            return self._errors[0] if first is None else first
        head, *sides = str(self._errors[0]).split(FAILED_SIDE)
        for error in self._errors[1:]:  # of other buckets: the same sides, or more of them
            sides += str(error).split(FAILED_SIDE)[1:]
        found = WeightError(FAILED_SIDE.join([head, *dict.fromkeys(sides)]))
        found.__cause__ = self._errors[0].__cause__
        return found
