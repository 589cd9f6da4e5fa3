"""Wait with a deadline for other processes, by a process that may itself stand still: stopped by Ctrl-Z, or its container frozen."""

import asyncio
from collections.abc import Collection
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
