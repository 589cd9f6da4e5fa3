"""Waits with a deadline in a process that stands still."""

import asyncio
import time

import pytest

from moerl.cluster.patient_wait import PatientTimeout, patient_wait


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


def test_what_waits_for_an_answer_is_not_cancelled_by_a_standstill():
    async def main() -> str:
        asyncio.get_running_loop().call_later(0.05, time.sleep, 1.0)
        async with PatientTimeout(0.9):
            return await asyncio.create_task(asyncio.sleep(0.3, "answer"))

    assert asyncio.run(main()) == "answer"


def test_a_deadline_with_patience_ends_what_waits_and_nothing_after_it():
    async def main() -> None:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with PatientTimeout(0.3):
                await asyncio.sleep(60)
        assert 0.3 <= time.monotonic() - began < 2.0
        with pytest.raises(KeyError):
            async with PatientTimeout(0.1):
                raise KeyError
        async with PatientTimeout(0.1):
            pass
        await asyncio.sleep(0.2)
        waits = asyncio.create_task(_wait())
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    async def _wait() -> None:
        async with PatientTimeout(60):
            await asyncio.sleep(60)

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
