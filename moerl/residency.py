"""Who holds the GPUs that the trainer and rollout servers share: one state machine for a run.

    serving --train--> training --share--> sharing --serve--> serving      a step
    serving -------------share-----------> sharing --serve--> serving      a server came back, or a canary is scored

              trainer                                      servers on its GPUs
    serving   asleep                                       weights and caches: they serve
    training  awake                                        asleep: weights and caches are dropped
    sharing   awake, with what scoring and a push need     memory for weights, no caches: a push has somewhere to go

Whoever leaves goes first. Servers on GPUs of their own take no part in it: without shared ones only the trainer sleeps and wakes.
Whoever trained pushes before servers serve (moerl/publish.py), so that they bring no weights back: from training on they are stale, and one
that a push did not reach serves nothing. In sharing from serving, as for a canary, they keep them.
What of it leaves the GPU is train.offload's to say (moerl/train/memory/memory_states.py).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from moerl.observe.metrics import move_metrics
from moerl.rollout.fleet.fleet import Member
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.rollout.server.contract import PARTS, MemoryPart
from moerl.train.group import TrainGroup
from moerl.types.errors import EngineError, MoerlError, ResidencyError
from moerl.types.stats import Move

logger = logging.getLogger(__name__)

State = Literal["serving", "training", "sharing"]
FOLLOWS: dict[State, tuple[State, ...]] = {"training": ("serving",), "sharing": ("training", "serving"), "serving": ("sharing",)}
"""state -> those it may be entered from."""


class Residency:
    """Begins in training. A move that fails is not taken back: no other begins after it."""

    def __init__(self, train: TrainGroup, pool: RolloutPool, *, num_shared: int):
        """`num_shared`: the first so many servers are on the trainer's GPUs."""
        self._train, self._pool, self._fleet = train, pool, pool.fleet
        self._shared: Sequence[Member] = self._fleet.members[:num_shared]
        self.state: State = "training"
        self._entering: State | None = None
        self._moves: dict[str, Move] = {}

    @property
    def serves(self) -> bool:
        """Whether it is in serving, and no move has begun, or failed."""
        return self.state == "serving" and self._entering is None

    async def make_room(self) -> None:
        """Memory of servers that have just started, for a trainer that starts next: an engine takes the memory that it finds free."""
        await self._servers_leave(PARTS)

    async def train(self, failed: MoerlError | None = None) -> None:
        """Requests that shared servers run are ended; the pool takes them elsewhere, or up again when these servers are back. `failed`:
        error of a push that left the GPUs in between, which is raised."""
        if failed is not None:
            raise failed
        async with self._enter("training"):
            await self._servers_leave(PARTS)
            await self._timed("trainer_wake", self._train.wake())

    async def share(self) -> None:
        """To sharing: weights of both are on the GPUs, neither the optimizer nor caches. Nothing to do in sharing."""
        if self.state == "sharing" and self._entering is None:
            return
        async with self._enter("sharing"):
            if self.state == "training":
                await self._timed("trainer_shed", self._train.shed())
                await self._timed("servers_wake_weights", self._each(lambda member: self._pool.wake(("weights",), [member])))
            else:
                await self._servers_leave(("cache",))
                await self._timed("trainer_wake", self._train.wake())

    async def serve(self) -> None:
        """To serving: the trainer sleeps, the servers have their caches and take requests again."""
        async with self._enter("serving"):
            await self._timed("trainer_sleep", self._train.sleep())
            await self._timed("servers_wake_cache", self._each(lambda member: self._pool.wake(("cache",), [member])))
            await self._each(self._resume)
            self._fleet.take_back(self._shared)

    def step_metrics(self) -> dict[str, float]:
        """Metrics of the moves since the last call; none where no GPU is shared."""
        moves, self._moves = self._moves, {}
        return move_metrics(moves) if self._shared else {}

    @asynccontextmanager
    async def _enter(self, after: State) -> AsyncIterator[None]:
        if self._entering is not None:
            raise ResidencyError(f"{self.state} -> {after}: the move from {self.state} to {self._entering} has not ended, or failed")
        if self.state not in FOLLOWS[after]:
            only = f"{after} follows {' or '.join(FOLLOWS[after])} only"
            raise ResidencyError(f"{self.state} -> {after}: the trainer's GPUs are in state {self.state}, and {only}")
        self._entering = after
        yield
        logger.info("%s -> %s", self.state, after)
        self.state, self._entering = after, None

    async def _servers_leave(self, parts: tuple[MemoryPart, ...]) -> None:
        await self._fleet.lend(self._shared)
        await self._timed("servers_sleep", self._each(lambda member: self._sleep(member, parts)))

    async def _sleep(self, member: Member, parts: tuple[MemoryPart, ...]) -> int:
        await self._pool.pause("abort", [member])
        await self._pool.abort([member])  # also what waits there: others may be free
        return await self._pool.sleep(parts, [member])

    async def _resume(self, member: Member) -> int:
        await self._pool.resume([member])
        return 0

    async def _each(self, call: Callable[[Member], Awaitable[int]]) -> int:
        """The sum over shared servers that run."""
        running = [member for member in self._fleet.running() if member in self._shared]
        return sum(await asyncio.gather(*(self._unless_lost(member, call) for member in running)))

    async def _unless_lost(self, member: Member, call: Callable[[Member], Awaitable[int]]) -> int:
        """A server that ends has left the GPU with that, and starts again when the servers are back."""
        before = {member: member.num_starts}
        try:
            return await call(member)
        except EngineError as error:
            if not await self._fleet.lost(before):
                raise
            logger.warning("a server ended while its GPUs changed hands: %s", error)
            return 0

    async def _timed(self, name: str, move: Awaitable[int]) -> None:
        begun = time.perf_counter()
        num_bytes = await move
        seconds = time.perf_counter() - begun
        before = self._moves.get(name, Move(seconds=0.0, num_bytes=0))
        self._moves[name] = Move(seconds=before.seconds + seconds, num_bytes=before.num_bytes + num_bytes)
