"""Calls of one step of a push to all of its sides at once: every failure is gathered, and who is the cause stands first. Blocking ones that
wait for each other, off the event loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from moerl.cluster.error_texts import is_consequence
from moerl.cluster.patient_wait import patient_wait
from moerl.types.errors import HangError, WeightError

P = ParamSpec("P")
T = TypeVar("T")

SOURCE = "trainer"
"""Name of the sending side in errors."""

OnLate = Callable[[str, Sequence[str]], Awaitable[HangError]]
"""Called with the time that there was, in words, and the names of the sides that did not arrive: the report about them."""
PATIENCE = 0.9
"""Share of the deadline of a call: a side that has waited so long for another says so, and who says nothing by the deadline is the one that
hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushCalls:
    """Deadlines of calls, and who looks at those that do not end."""

    deadline_seconds: float
    """Bounds one call to all sides."""
    settle_seconds: float
    """Given to the others, once one has failed, before their calls are cancelled."""
    on_late: OnLate | None = None
    """Looks at those first."""

    async def together(self, step: str, calls: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
        """All calls at once, and what they return. When not all succeed in time: an error of the trainer that is none of the push, as it
        is; else WeightError with every failure, first failure first."""
        tasks: dict[str, asyncio.Future[T]] = {name: asyncio.ensure_future(call) for name, call in calls.items()}
        ended: list[asyncio.Future[T]] = []
        late: HangError | None = None
        begun = time.monotonic()
        for task in tasks.values():
            task.add_done_callback(ended.append)
        try:
            if (hanging := await self._hanging(tasks)) and self.on_late is not None:
                late = await self.on_late(self._had(time.monotonic() - begun, step), hanging)
        finally:
            silent = [name for name, task in tasks.items() if not task.done()]
            for name in silent:
                tasks[name].cancel()
            outcomes = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
        await asyncio.sleep(0)  # from Python 3.12 on a gather of finished tasks does not yield, and the last have not been noted yet
        in_order_of_end = sorted(tasks, key=lambda name: ended.index(tasks[name]))
        failures = {name: failure for name in in_order_of_end if isinstance(failure := outcomes[name], BaseException)}
        of_trainer = failures.get(SOURCE)
        if of_trainer is not None and SOURCE not in silent and not isinstance(of_trainer, WeightError):
            raise of_trainer
        if failures:
            said = _explain(step, failures, silent)
            if late is not None:
                raise WeightError(f"{said}\n{late}") from late
            raise WeightError(said) from next(iter(failures.values()))
        return {name: task.result() for name, task in tasks.items()}

    def _had(self, seconds: float, step: str) -> str:
        """The deadline that whoever is silent has missed by now: of the push, or, after a failure before that, the shorter one."""
        if seconds < PATIENCE * self.deadline_seconds:
            return f"{self.settle_seconds:g} s after the first failure at {step} (deadlines.settle_seconds)"
        return f"{self.deadline_seconds:g} s at {step} (deadlines.push_seconds)"

    async def _hanging(self, tasks: Mapping[str, asyncio.Future[T]]) -> list[str]:
        """To be looked at: those that have not ended at the deadline, or some time after the first failure; if each has only lost or
        awaited others, all that failed. Nobody where a cause is known: who then has not ended may be well, and busy."""
        done, pending = await patient_wait(tasks.values(), seconds=self.deadline_seconds, return_when=asyncio.FIRST_EXCEPTION)
        if pending and any(task.exception() is not None for task in done):
            await asyncio.wait(pending, timeout=self.settle_seconds)
            if SOURCE in tasks and not tasks[SOURCE].done():  # it has deadlines of its own, and then names the rank that failed
                await asyncio.wait([tasks[SOURCE]], timeout=self.deadline_seconds)
                await asyncio.wait(tasks.values(), timeout=self.settle_seconds)
        failed = {name: error for name, task in tasks.items() if task.done() and (error := task.exception()) is not None}
        if not all(map(is_consequence, failed.values())):
            return []
        silent = [name for name, task in tasks.items() if not task.done()]
        return silent or (list(failed) if SOURCE in tasks else [])


def _explain(step: str, failures: Mapping[str, BaseException], silent: Sequence[str]) -> str:
    """Errors of all sides; of those that only lost another they come last, if more is known of others."""
    said = {name: f"{type(failure).__name__}: {failure}" for name, failure in failures.items()}
    said |= dict.fromkeys(silent, "did not end in time and was cancelled")
    consequences = [name for name, failure in failures.items() if name not in silent and is_consequence(failure)]
    causes = [name for name in failures if name not in consequences] or consequences
    head = f"weight push failed at {step}; every receiver is stale until a push succeeds. What failed, the first one first:"
    lines = [head, *(f"* {name}: {said[name]}" for name in causes)]
    if others := [name for name in consequences if name not in causes]:
        lines += ["lost them, or waited for them:", *(f"* {name}: {said[name].splitlines()[0]}" for name in others)]
    return "\n".join(lines)


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As asyncio.to_thread, whose pool may have fewer threads than there are calls, of which the last would end the others' wait."""
    thread = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, partial(call, *args, **kwargs))
    finally:
        thread.shutdown(wait=False)
