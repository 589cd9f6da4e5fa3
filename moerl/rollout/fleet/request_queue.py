"""Which waiting request goes to which server, and when.

A server gets as many requests as it runs, and a few that wait there, or fewer if its cache has no room for them
(moerl/rollout/fleet/cache_bound.py); all others wait here, so that a server that has a free place takes the next one. Requests of one
session (the samples of a prompt, the turns of a conversation) have a prefix in common, which a server that has computed it need not
compute again: its home.

Invariants, by the names of their tests:
* bounded: no server ever has more than max_running + max_queued requests, and none gets one above its bound.
* busy: while a request waits, no healthy server has a free place.
* in_order: a request is overtaken by at most LOOK_AHEAD - 1 that came later, and only by those whose home is the server that takes them,
  or that have none yet.
"""

import asyncio
from bisect import insort
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from moerl.rollout.fleet.cache_bound import CacheBound
from moerl.rollout.fleet.fleet import Fleet, Member
from moerl.types.completion import ServerLoad

LOOK_AHEAD = 256
"""Enough for 32 servers to work on groups of 8 each; looking at as many takes some 10 us."""

_STICKY_SHARE = 4
"""A home may have a quarter of max_running more requests than the least loaded: a group of that size stays together on an even fleet, and
decoding a batch takes nearly as long as one smaller by a quarter, because every weight is read once for all of it."""

_MAX_HOMES = 65_536
"""Sessions remembered; by then a server has long used the memory of the oldest for others."""


@dataclass(eq=False, slots=True, kw_only=True)
class Claim:
    """One request, for as long as it lives; it may need several places, one after the other."""

    number: int
    """Place in the order of arrival."""
    session: str
    place: "asyncio.Future[Member]" = field(init=False)
    """The one it waits for, or had last."""


class RequestQueue:
    """Owned by one event loop."""

    def __init__(self, fleet: Fleet, *, max_running: int, max_queued: int, cache_high: float):
        """Limits of each server. `cache_high`: share of its cache above which it gets no new request."""
        self._fleet = fleet
        self.bounds = {member: CacheBound(most=max_running + max_queued, high=cache_high) for member in fleet.members}
        self._slack = max_running // _STICKY_SHARE
        self._waiting: list[Claim] = []  # by number
        self._homes: OrderedDict[str, Member] = OrderedDict()  # least recently used first
        self._num_claims = 0
        fleet.on_change.append(self._assign)
        fleet.on_load.append(self.report)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def report(self, member: Member, load: ServerLoad) -> None:
        """Its bound follows; also while it has what it answers here."""
        self.bounds[member].report(load, member.num_in_flight)
        self._assign()

    def claim(self, session: str) -> Claim:
        self._num_claims += 1
        return Claim(number=self._num_claims, session=session)

    @asynccontextmanager
    async def take(self, claim: Claim) -> AsyncIterator[Member]:
        """Waits for a place and gives it back at the end. EngineError if no server will ever serve again."""
        member = await self._wait(claim)
        try:
            yield member
        finally:
            self._give_back(member)

    async def _wait(self, claim: Claim) -> Member:
        claim.place = asyncio.get_running_loop().create_future()
        insort(self._waiting, claim, key=lambda waiting: waiting.number)
        self._assign()
        try:
            return await claim.place
        except asyncio.CancelledError:
            if claim in self._waiting:
                self._waiting.remove(claim)
            elif not claim.place.cancelled() and claim.place.exception() is None:
                self._give_back(claim.place.result())
            raise

    def _give_back(self, member: Member) -> None:
        member.num_in_flight -= 1
        self._assign()

    def _assign(self) -> None:
        """Until nobody waits or no place is free."""
        if not self._waiting:
            return
        try:
            self._fleet.check()
        except Exception as error:  # also a bug of the watch: those who wait must hear of it
            self._fail(error)
            return
        while self._waiting and (free := self._free()):
            index, member = self._next(free)
            claim = self._waiting.pop(index)
            if claim.place.done():  # its deadline is over
                continue
            member.num_in_flight += 1
            self._remember(claim.session, member)
            claim.place.set_result(member)

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, []
        for claim in waiting:
            if not claim.place.done():
                claim.place.set_exception(error)

    def _free(self) -> list[Member]:
        return [member for member in self._fleet.healthy() if member.num_in_flight < self.bounds[member].now]

    def _next(self, free: list[Member]) -> tuple[int, Member]:
        """The place in the queue of the next request, and its server."""
        least = min(free, key=lambda member: member.num_in_flight)
        first = self._waiting[0]
        home = self._homes.get(first.session)
        if home is None or home.state != "healthy" or home.is_lent:
            return 0, least
        if home in free:
            return 0, home if home.num_in_flight - least.num_in_flight <= self._slack else least
        for index, claim in enumerate(self._waiting):
            if claim.number >= first.number + LOOK_AHEAD:
                break
            if self._homes.get(claim.session, least) is least:
                return index, least
        return 0, least

    def _remember(self, session: str, member: Member) -> None:
        self._homes[session] = member
        self._homes.move_to_end(session)
        if len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)
