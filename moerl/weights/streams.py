"""All trainer ranks' buckets on their way at once: each rank fills a bucket while its readers install the one before.

After the first failure nothing more is begun, what has begun gets some time to end, and everything that failed until then is told together.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from moerl.push_types import Bucket
from moerl.types import WeightError
from moerl.weights.send import NUM_BUFFERS

T = TypeVar("T")

FAILED_SIDE = "\n* "
"""Begins what each failed side says, in the text of an error of a push."""


class Streams:
    def __init__(
        self, pack: Callable[[int, int], Awaitable[Bucket]], install: Callable[[Bucket], Awaitable[None]], *, settle_seconds: float
    ):
        """`pack(rank, index)`; `install` returns when all readers have installed."""
        self._pack, self._install, self._settle_seconds = pack, install, settle_seconds
        self._errors: list[Exception] = []
        self._failed = asyncio.Event()

    async def run(self, num_buckets: Mapping[int, int]) -> list[Bucket]:
        """`num_buckets`: by rank. Raises an error that is no WeightError as it is, as it is nearest to the cause; else one WeightError."""
        streams = asyncio.gather(*(self._stream(rank, number) for rank, number in num_buckets.items()))
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
                    continue
                bucket = await self._guarded(self._pack(rank, len(packed)))
                if bucket is not None:
                    packed.append(bucket)
                    installing.append(asyncio.create_task(self._guarded(self._install(bucket))))
            await asyncio.gather(*installing)
        finally:
            for task in installing:
                task.cancel()
            await asyncio.gather(*installing, return_exceptions=True)
        return packed

    async def _guarded(self, call: Awaitable[T]) -> T | None:
        try:
            return await call
        except Exception as error:  # told by run, with the others
            self._errors.append(error)
            self._failed.set()
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
