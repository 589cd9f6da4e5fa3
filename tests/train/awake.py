"""A trainer that is awake for a block and sleeps after it, as around the phases of a step."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakSet

_ASLEEP: WeakSet[Any] = WeakSet()
"""A group starts awake, and a second wake is refused."""


@asynccontextmanager
async def awake(group: Any) -> AsyncIterator[None]:
    if group in _ASLEEP:
        _ASLEEP.remove(group)
        await group.wake()
    yield
    await group.sleep()
    _ASLEEP.add(group)
