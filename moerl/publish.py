"""Publish a version to the rollout servers: pause, push, resume, and from time to time a canary (server_trust.py).

A server that ends in a push does not end the push: it is brought to the others, and to that one when it is back.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

from moerl.canary import CanaryResult
from moerl.cluster.patient_wait import patient_wait
from moerl.config.derive.gpu_map import gpu_map, num_shared
from moerl.config.schema.run_config import RunConfig
from moerl.hangs.hang_reports import HangReports
from moerl.observe.metrics import push_metrics
from moerl.residency import Residency
from moerl.rollout.fleet.fleet import Member
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.server_trust import ServerTrust
from moerl.train.group import TrainGroup
from moerl.types.errors import EngineError, HangError, MoerlError, WeightError
from moerl.types.push import PushStats, Transport
from moerl.weights.plan.run_plan import KeptPlan, RankPlaces
from moerl.weights.plan.transfer_plan import Rails
from moerl.weights.process_rails import ProcessRails
from moerl.weights.push_calls import SOURCE
from moerl.weights.sync import WeightSync, resolve_transport

logger = logging.getLogger(__name__)
T = TypeVar("T")


class WeightPublisher:
    def __init__(
        self, config: RunConfig, *, train: TrainGroup, pool: RolloutPool, residency: Residency, trust: ServerTrust,
        rails: ProcessRails | None = None,
    ):  # fmt: skip
        """The pool must have started before the first push. `rails`: of the servers with which the pool began, and of the ranks."""
        self._config, self._train, self._residency, self._trust = config, train, residency, trust
        self._pool, self._fleet, self._rails = pool, pool.fleet, rails
        self._version = 0
        self._sync: WeightSync | None = None
        self._connected_to: list[tuple[str, int]] = []
        self._transport: Transport | None = None
        self._plan = KeptPlan()
        self._pushing = asyncio.Lock()
        self._last_push: PushStats | None = None

    def step_metrics(self) -> dict[str, float]:
        """Counts of servers that were restarted, of completions that went on after a push and of preemptions, so far; the bound by caches;
        and the newest push of this version, which is absent if no server was there."""
        counts = {
            "fleet/restarts": float(self._fleet.num_restarts),
            "fleet/retired": float(self._fleet.num_retired),
            "fleet/resumed": float(self._pool.num_resumed),
            "fleet/preempted": float(self._pool.num_preempted),
            "fleet/bound": float(self._pool.least_bound),
        }
        return counts if self._last_push is None else counts | push_metrics(self._last_push)

    async def push(self, version: int) -> CanaryResult | None:
        """Requests in flight stop, or come back with what they have (rollout.partial), and go on with the new weights. Afterwards the
        servers have their GPUs back. The canary's result, when it ran."""
        self._version, self._last_push = version, None
        self._trust.begin(version)
        return await self._bring(self._fleet.running, with_canary=self._trust.canary_is_due)

    @property
    def servers(self) -> dict[str, int]:
        """Numbers of the servers that have the present version, by the nonces of the pushes that brought it."""
        return self._fleet.servers_of(self._version)

    async def serve_while(self, work: Awaitable[T], phase: Literal["rollout", "eval"] = "rollout") -> T:
        """`work`; servers that are restarted meanwhile get the present weights. For a time in which nothing else uses the trainer."""
        working, reviving = asyncio.ensure_future(work), asyncio.create_task(self._revive())
        try:
            seconds = self._config.deadlines.of(phase)
            done, _ = await patient_wait({working, reviving}, seconds=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise await self._late_rollout(f"{seconds:g} s (deadlines.{phase}_seconds)")
            async with self._pushing:
                if reviving.done():
                    reviving.result()
                return working.result()
        finally:
            working.cancel()
            async with self._pushing:  # a push that has begun is brought to its end: whatever comes next needs the trainer
                reviving.cancel()
            await asyncio.gather(working, reviving, return_exceptions=True)
            if not self._residency.serves and not reviving.cancelled():
                reviving.result()  # whoever gave up `work` meanwhile, to save, must hear why the trainer cannot have the GPUs

    async def _late_rollout(self, deadline: str) -> MoerlError:
        busy = [member for member in self._fleet.members if member.num_in_flight]
        hang = await self._pool.hang(deadline, busy)
        return hang if hang is not None else EngineError(f"what was asked of the servers took longer than {deadline}")

    async def _revive(self) -> None:
        while True:
            await self._fleet.until_stale()
            async with self._pushing:
                await self._bring(self._fleet.stale, with_canary=True)

    async def _bring(self, select: Callable[[], list[Member]], *, with_canary: bool) -> CanaryResult | None:
        """The present version to `select()`; anew, to those that are left, if one of them ends meanwhile."""
        self._fleet.phase = "push"
        try:
            return await self._bring_to(select, with_canary=with_canary)
        finally:
            self._fleet.phase = "rollout"

    async def _bring_to(self, select: Callable[[], list[Member]], *, with_canary: bool) -> CanaryResult | None:
        while members := select():
            before = {member: member.num_starts for member in members}
            try:
                return await self._push(members, with_canary=with_canary)
            except (EngineError, WeightError) as error:
                names = error.names if isinstance(error, WeightError) else ()
                liars = [member for member in members if member.name in names]
                if not self._trust.retires(liars, error) and not await self._fleet.lost(before):
                    raise
                logger.warning("the push of version %d begins anew, without a server that ended: %s", self._version, error)
        await self._residency.share()
        await self._residency.serve()  # those that come back start then
        return None

    async def _push(self, members: list[Member], *, with_canary: bool) -> CanaryResult | None:
        await self._residency.share()
        sync = await self._sync_with(members)
        await self._pool.pause("abort" if self._config.rollout.partial else "keep", members)
        starts = {member: member.num_starts for member in members}
        self._last_push = await sync.push(self._version)
        # One that ended in the last call of the push, after its answer, and was started again has nothing of it, and perhaps another name.
        members = [member for member in members if member.num_starts == starts[member]]
        self._fleet.served(members, version=self._version, push_ids=self._last_push.push_ids)
        self._fleet.forget_pushes(before=self._version - self._config.max_staleness)
        await self._pool.resume([member for member in members if not member.is_lent])
        await self._residency.serve()
        return await self._trust.canary(members) if with_canary and members else None

    async def _sync_with(self, members: list[Member]) -> WeightSync:
        """Connected to just these processes."""
        if self._transport is None:
            self._rank_hosts = await self._train.hosts()
            hosts = [host for member in self._fleet.members for host in member.engine.hosts]
            shares = num_shared(self._config) > 0
            chosen = self._config.weights.transport
            self._transport = resolve_transport(chosen, source_hosts=self._rank_hosts, receiver_hosts=hosts, shares_gpus=shares)
            logger.info("weights go by %s", self._transport)
        wanted = [(member.name, member.num_starts) for member in members]
        if self._sync is None or wanted != self._connected_to:
            receivers = {member.name: member.engine for member in members}
            deadlines = self._config.deadlines
            self._sync = WeightSync(
                self._train.weight_source,
                receivers,
                transport=self._transport,
                nodes={member.name: member.engine.hosts for member in members},
                ranks=self._rank_places(members) if self._transport == "relay" else None,
                rails=self._rails_of(members),
                plan=self._plan,
                deadline_seconds=deadlines.push_seconds,
                settle_seconds=deadlines.settle_seconds,
                on_late=None if self._pool.hangs is None else partial(self._late, self._pool.hangs, members),
            )
            self._connected_to = wanted
        return self._sync

    def _rank_places(self, members: list[Member]) -> RankPlaces:
        mapped = gpu_map(self._config)
        servers = dict(zip(self._fleet.members, mapped.servers, strict=True))
        return RankPlaces(
            nodes=self._rank_hosts,
            gpus=[gpu.index for gpu in mapped.ranks],
            server_gpus={member.name: [gpu.index for gpu in servers[member]] for member in members},
        )

    def _rails_of(self, members: Sequence[Member]) -> Rails | None:
        if self._rails is None:
            return None
        servers = dict(zip(self._fleet.members, self._rails.servers, strict=True))
        return Rails(senders=self._rails.ranks, readers=tuple(rail for member in members for rail in servers[member]))

    async def _late(self, hangs: HangReports, members: list[Member], deadline: str, silent: Sequence[str]) -> HangError:
        """The report; a server that alone is to blame is ended, so that the push begins anew without it."""
        servers = {each.name: member for member in members for each in member.engine.watched}
        names = [name for name, member in servers.items() if member.name in silent]
        ranks = [each.name for each in self._train.watched] if SOURCE in silent else []
        all_watched = [each for member in members for each in member.engine.watched]
        error = await hangs.report("push", deadline, watched=all_watched, silent=[*names, *ranks])
        if all(name in servers for name in error.names):
            for name in error.names:
                servers[name].engine.kill()
        return error
