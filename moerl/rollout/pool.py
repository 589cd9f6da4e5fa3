"""All rollout servers as one: a request goes to the least loaded, a command to every one."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from moerl.rollout.engine import EngineHealth, PauseMode, RolloutEngine, WeightReceiver
from moerl.types import Completion, EngineError, SamplingParams

T = TypeVar("T")


class RolloutPool:
    """Owned by one event loop."""

    def __init__(self, engines: Sequence[RolloutEngine], *, request_seconds: float):
        """`request_seconds`: deadline of one completion, with the time it waits for a slot or is paused."""
        if not engines:
            raise EngineError("rollout.num_servers = 0: must be at least 1; nothing could generate")
        self.engines = tuple(engines)
        self._request_seconds = request_seconds
        self._in_flight = [0] * len(engines)

    async def start(self) -> None:
        """All servers at once; if one fails, the others are closed."""
        try:
            await self._all("start", lambda engine: engine.start())
        except BaseException:
            await self.close()
            raise

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion:
        """EngineError if the server refuses it or dies, or at the deadline; the server then drops the request."""
        index = min(range(len(self.engines)), key=self._in_flight.__getitem__)
        engine = self.engines[index]
        self._in_flight[index] += 1
        try:
            async with asyncio.timeout(self._request_seconds):
                return await engine.generate(prompt_ids, sampling, request_id)
        except TimeoutError as error:
            raise EngineError(
                f"{engine.name}: {request_id} took longer than rollout.request_seconds = {self._request_seconds:g}; the server hangs, is "
                "paused, or has more requests than it can serve in time. Look at its log, or raise the deadline"
            ) from error
        finally:
            self._in_flight[index] -= 1

    async def abort(self, request_ids: tuple[str, ...] | None = None) -> None:
        """On every server: a server ignores ids it does not know."""
        await self._all("abort", lambda engine: engine.abort(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        await self._all("pause", lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._all("resume", lambda engine: engine.resume())

    async def sleep(self) -> None:
        await self._all("sleep", lambda engine: engine.sleep())

    async def wake(self) -> None:
        await self._all("wake", lambda engine: engine.wake())

    async def close(self) -> None:
        await self._all("close", lambda engine: engine.close())

    async def healths(self) -> dict[str, EngineHealth]:
        """By the servers' names."""
        healths = await self._all("health", lambda engine: engine.health())
        return {engine.name: health for engine, health in zip(self.engines, healths, strict=True)}

    def receivers(self) -> dict[str, WeightReceiver]:
        """By the servers' names, which are final after start."""
        return {engine.name: engine.receiver() for engine in self.engines}

    async def _all(self, action: str, call: Callable[[RolloutEngine], Awaitable[T]]) -> list[T]:
        """Waits for every server, also when one fails; EngineError with every failure."""
        outcomes = await asyncio.gather(*(call(engine) for engine in self.engines), return_exceptions=True)
        failures = [(engine.name, outcome) for engine, outcome in zip(self.engines, outcomes, strict=True) if _failed(outcome)]
        if failures:
            lines = [f"{action} failed on {len(failures)} of {len(self.engines)} servers"]
            lines += [f"* {error}" if isinstance(error, EngineError) else f"* {name}: {error!r}" for name, error in failures]
            raise EngineError("\n".join(lines)) from failures[0][1]  # type: ignore[misc]
        return outcomes  # type: ignore[return-value]


def _failed(outcome: object) -> bool:
    return isinstance(outcome, BaseException)
