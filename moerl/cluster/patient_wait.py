"""Waits with a deadline for other processes, by a process that may itself stand still: stopped by Ctrl-Z, or its container frozen."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

_NUM_PARTS = 10
"""Time in which this process stands still counts as one part of the deadline, at most."""


async def patient_wait(
    futures: Collection[asyncio.Future[Any]], *, seconds: float, return_when: str = asyncio.ALL_COMPLETED
) -> tuple[set[asyncio.Future[Any]], set[asyncio.Future[Any]]]:
    """As asyncio.wait, which after a standstill finds its time over before it hears of what came meanwhile."""
    for _ in range(_NUM_PARTS):
        done, pending = await asyncio.wait(futures, timeout=seconds / _NUM_PARTS, return_when=return_when)
        if not pending or (done and return_when == asyncio.FIRST_COMPLETED):
            break
        if return_when == asyncio.FIRST_EXCEPTION and any(not each.cancelled() and each.exception() is not None for each in done):
            break
    return done, pending


@asynccontextmanager
async def patient_timeout(seconds: float) -> AsyncIterator[None]:
    """As asyncio.timeout, which after a standstill cancels what waits for an answer that has come meanwhile."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as limit:

        def begin(num_left: int) -> None:
            nonlocal timer
            if num_left:
                timer = loop.call_later(seconds / _NUM_PARTS, begin, num_left - 1)
            else:
                limit.reschedule(loop.time())

        begin(_NUM_PARTS)
        try:
            yield
        finally:
            timer.cancel()
