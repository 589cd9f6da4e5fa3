"""A wait with a deadline in a process that stands still."""

import asyncio
import time

import pytest

from moerl.cluster.patient_wait import patient_wait


@pytest.mark.parametrize("return_when", [asyncio.ALL_COMPLETED, asyncio.FIRST_COMPLETED, asyncio.FIRST_EXCEPTION])
def test_what_comes_after_a_standstill_beyond_the_deadline_is_heard(return_when):
    async def main() -> None:
        answer = asyncio.create_task(asyncio.sleep(0.3, "answer"))
        asyncio.get_running_loop().call_later(0.05, time.sleep, 1.0)
        late = asyncio.create_task(_after(answer))
        done, pending = await patient_wait([late], seconds=0.9, return_when=return_when)
        assert (done, pending) == ({late}, set())

    async def _after(answer: asyncio.Task[str]) -> str:
        await answer
        await asyncio.sleep(0.1)  # it comes a moment after the process goes on
        return answer.result()

    asyncio.run(main())


def test_the_deadline_and_what_ends_a_wait_are_those_of_asyncio():
    async def fail() -> None:
        raise KeyError

    async def main() -> None:
        never, failed, ended = asyncio.create_task(asyncio.sleep(60)), asyncio.create_task(fail()), asyncio.create_task(asyncio.sleep(0))
        began = time.monotonic()
        assert await patient_wait([never, ended], seconds=0.5, return_when=asyncio.FIRST_COMPLETED) == ({ended}, {never})
        assert await patient_wait([never, failed], seconds=0.5, return_when=asyncio.FIRST_EXCEPTION) == ({failed}, {never})
        assert time.monotonic() - began < 0.4
        assert await patient_wait([never, ended], seconds=0.5, return_when=asyncio.FIRST_EXCEPTION) == ({ended}, {never})
        assert await patient_wait([never, failed], seconds=0.5) == ({failed}, {never})
        assert 1.0 <= time.monotonic() - began < 3.0
        never.cancel()

    asyncio.run(main())
