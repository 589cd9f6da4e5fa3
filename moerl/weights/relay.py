"""Buckets over a network, once to every node: to their first reader, and from its memory to the others of its node.

The driver leads both steps, so no reader waits for another: the second begins when the first reader has installed the bucket, and the
memory is filled again when all have. Readers that told each other could each wait for what lies behind the other's present bucket.
What reaches a first reader does so in the order of the rounds, which is every sender's too: NCCL does what it is given in order, on both
sides.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from moerl.push_types import Bucket
from moerl.weights.deliveries import Job

NUM_SLOTS = 2
"""Buckets that a reader keeps for others of its node: one is filled while they read the other."""


class Relays:
    """Of one push."""

    def __init__(self, jobs: Mapping[int, Job], install: Callable[[Bucket], Awaitable[None]]):
        """`install` returns when all of `bucket.readers` have installed."""
        self._install = install
        self._due: dict[int, deque[tuple[int, int, int]]] = defaultdict(deque)
        for bucket in sorted((bucket for job in jobs.values() for bucket in job), key=_place):
            self._due[bucket.readers[0]].append(_place(bucket))
        self._moved = asyncio.Condition()
        self._free: dict[int, asyncio.Queue[int]] = defaultdict(_all_slots)

    async def install(self, bucket: Bucket) -> None:
        """Returns when all readers have installed."""
        first, *others = bucket.readers
        async with self._moved:
            await self._moved.wait_for(lambda: self._due[first][0] == _place(bucket))
        slot = await self._free[first].get()
        try:
            try:
                await self._install(replace(bucket, readers=(first,), slot=slot))
            finally:
                await self._next(first)
            if others:
                await self._install(replace(bucket, readers=tuple(others), slot=slot, relay=first))
        finally:
            self._free[first].put_nowait(slot)

    async def _next(self, first: int) -> None:
        self._due[first].popleft()
        async with self._moved:
            self._moved.notify_all()


def _place(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.round, bucket.sender, bucket.index


def _all_slots() -> asyncio.Queue[int]:
    found: asyncio.Queue[int] = asyncio.Queue()
    for slot in range(NUM_SLOTS):
        found.put_nowait(slot)
    return found
