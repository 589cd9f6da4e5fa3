"""Waits with a deadline for other processes, by a process that may itself stand still: stopped by Ctrl-Z, or its container frozen."""

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


class PatientTimeout:
    """As asyncio.timeout, which after a standstill cancels what waits for an answer that has come meanwhile."""

    def __init__(self, seconds: float):
        self._seconds, self._limit = seconds, asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._begin(_NUM_PARTS)

    async def __aexit__(self, *error: Any) -> None:
        """Raises TimeoutError when the time is over."""
        self._timer.cancel()
        await self._limit.__aexit__(*error)

    def _begin(self, num_left: int) -> None:
        loop = asyncio.get_running_loop()
        if num_left:
            self._timer = loop.call_later(self._seconds / _NUM_PARTS, self._begin, num_left - 1)
        else:
            self._limit.reschedule(loop.time())
