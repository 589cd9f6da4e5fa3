"""All rollout servers as one: a request goes to the least loaded that serves, a command to every one that runs.

A request whose server ends is run again, from its prompt and with its seed, on another one, or on the same one once it is back.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

from moerl.rollout.engine import EngineHealth, PauseMode, RolloutEngine
from moerl.rollout.fleet import Fleet, Member
from moerl.types import Completion, EngineError, EngineUnavailable, SamplingParams

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_ATTEMPTS = 5
"""Of one request: one that ends every server it comes to must not go on."""


class RolloutPool:
    """Owned by one event loop."""

    def __init__(self, engines: Sequence[RolloutEngine], *, request_seconds: float, max_restarts: int = 0, probe_seconds: float = 30.0):
        """`request_seconds`: deadline of one completion, with the time it waits for a slot, is paused, or waits for a server."""
        if not engines:
            raise EngineError("rollout.num_servers = 0: must be at least 1; nothing could generate")
        self.fleet = Fleet(engines, max_restarts=max_restarts, probe_seconds=probe_seconds)
        self._request_seconds = request_seconds

    async def start(self) -> None:
        """All servers at once; if one fails, the others are closed."""
        try:
            await self._all("start", lambda engine: engine.start(), self.fleet.members)
        except BaseException:
            await self.close()
            raise
        self.fleet.watch()

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion:
        """EngineError if the server refuses it, if no server is left, or at the deadline; the server then drops the request."""
        asked: list[str] = []
        try:
            async with asyncio.timeout(self._request_seconds):
                return await self._generate(prompt_ids, sampling, request_id, asked)
        except TimeoutError as error:
            raise EngineError(
                f"{asked[-1] if asked else 'no server serves'}: {request_id} took longer than rollout.request_seconds = "
                f"{self._request_seconds:g}; the server hangs, is paused, or has more requests than it can serve in time. Look at its log, "
                "or raise the deadline"
            ) from error

    async def abort(self, request_ids: tuple[str, ...] | None = None) -> None:
        """On every server: a server ignores ids it does not know."""
        await self._all("abort", lambda engine: engine.abort(request_ids))

    async def pause(self, mode: PauseMode, members: Collection[Member] | None = None) -> None:
        """`members`: these servers only."""
        await self._all("pause", lambda engine: engine.pause(mode), members)

    async def resume(self, members: Collection[Member] | None = None) -> None:
        """`members`: these servers only."""
        await self._all("resume", lambda engine: engine.resume(), members)

    async def sleep(self) -> None:
        await self._all("sleep", lambda engine: engine.sleep())

    async def wake(self) -> None:
        await self._all("wake", lambda engine: engine.wake())

    async def close(self) -> None:
        await self.fleet.close()
        await self._all("close", lambda engine: engine.close(), self.fleet.members)

    async def healths(self) -> dict[str, EngineHealth]:
        """Of those that run, by their names."""
        members = self.fleet.running()
        healths = await self._all("health", lambda engine: engine.health(), members)
        return {member.engine.name: health for member, health in zip(members, healths, strict=True)}

    async def _generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str, asked: list[str]) -> Completion:
        """`asked` gets the names of the servers."""
        while True:
            member = await self.fleet.least_loaded()
            asked.append(member.engine.name)
            member.num_in_flight += 1
            try:
                return await member.engine.generate(prompt_ids, sampling, request_id)
            except EngineUnavailable as error:
                if len(asked) == MAX_ATTEMPTS:
                    raise
                self.fleet.refused(member)
                logger.info("%s is run again: %s", request_id, str(error).splitlines()[0])
            finally:
                member.num_in_flight -= 1

    async def _all(self, action: str, call: Callable[[RolloutEngine], Awaitable[T]], members: Collection[Member] | None = None) -> list[T]:
        """Of all that run, or of `members`. Waits for every server, also when one fails; EngineError with every failure."""
        asked = {member: member.num_starts for member in (self.fleet.running() if members is None else members)}
        outcomes = await asyncio.gather(*(call(member.engine) for member in asked), return_exceptions=True)
        failures = {member: outcome for member, outcome in zip(asked, outcomes, strict=True) if isinstance(outcome, BaseException)}
        if failures:
            lines = [f"{action} failed on {len(failures)} of {len(asked)} servers"]
            lines += [f"* {e}" if isinstance(e, EngineError) else f"* {member.engine.name}: {e!r}" for member, e in failures.items()]
            raise EngineError("\n".join(lines)) from next(iter(failures.values()))
        return outcomes  # type: ignore[return-value]
