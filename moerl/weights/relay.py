"""Buckets over a network, once to every node: to their first reader, and from its memory to the others of its node.

The driver leads both steps, so no reader waits for another: the second begins when the first reader has installed the bucket, and the
memory is filled again when all have. Readers that told each other could each wait for what lies behind the other's present bucket.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from moerl.push_types import Bucket

NUM_SLOTS = 2
"""Buckets that a reader keeps for others of its node: one is filled while they read the other."""


class Relays:
    """Of one push."""

    def __init__(self, install: Callable[[Bucket], Awaitable[None]]):
        """`install` returns when all of `bucket.readers` have installed."""
        self._install = install
        self._free: dict[int, asyncio.Queue[int]] = defaultdict(_all_slots)

    async def install(self, bucket: Bucket) -> None:
        """Returns when all readers have installed."""
        first, *others = bucket.readers
        slot = await self._free[first].get()
        try:
            await self._install(replace(bucket, readers=(first,), slot=slot))
            if others:
                await self._install(replace(bucket, readers=tuple(others), slot=slot, relay=first))
        finally:
            self._free[first].put_nowait(slot)


def _all_slots() -> asyncio.Queue[int]:
    found: asyncio.Queue[int] = asyncio.Queue()
    for slot in range(NUM_SLOTS):
        found.put_nowait(slot)
    return found
