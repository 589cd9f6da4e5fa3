"""The invariants of moerl/rollout/fleet/request_queue.py, by their names."""

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.rollout.fleet.fleet import Fleet
from moerl.rollout.fleet.request_queue import LOOK_AHEAD, RequestQueue
from moerl.types.completion import ServerLoad
from moerl.types.errors import EngineError


class Named:
    def __init__(self, name):
        self.name = name


class Bench:
    """Claims that hold their place until they are told to end."""

    def __init__(self, num_servers, max_running=4, max_queued=1, cache_high=0.9):
        self.fleet = Fleet([Named(f"s{i}") for i in range(num_servers)], max_restarts=0, probe_seconds=1)
        self.places = RequestQueue(self.fleet, max_running=max_running, max_queued=max_queued, cache_high=cache_high)
        self.fleet.served(self.fleet.members)
        self.order, self.where, self.tasks, self.ends = [], {}, {}, {}

    async def start(self, session):
        claim = self.places.claim(session)
        self.ends[claim.number] = asyncio.Event()
        self.tasks[claim.number] = asyncio.create_task(self._hold(claim))
        await asyncio.sleep(0)
        return claim.number

    async def _hold(self, claim):
        async with self.places.take(claim) as member:
            self.order.append(claim.number)
            self.where[claim.number] = member
            try:
                await self.ends[claim.number].wait()
            finally:
                del self.where[claim.number]

    async def end(self, number):
        self.ends[number].set()
        await self.settle()

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)

    async def end_all(self):
        for event in self.ends.values():
            event.set()
        self.fleet.served(self.fleet.members)
        for task in self.tasks.values():
            with suppress(asyncio.CancelledError):
                await task


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["start", "start", "start", "end", "cancel", "stale", "served", "full", "roomy"]), st.integers(0, 9)),
    min_size=5,
    max_size=120,
)


@settings(max_examples=40, deadline=None)
@given(num_servers=st.integers(1, 3), actions=ACTIONS)
def test_bounded_and_busy_whatever_starts_ends_and_is_lost(num_servers, actions):
    async def scenario():
        bench = Bench(num_servers)
        for action, which in actions:
            member = bench.fleet.members[which % num_servers]
            if action == "start":
                await bench.start(f"g{which}")
            elif action == "end" and bench.where:
                await bench.end(sorted(bench.where)[which % len(bench.where)])
            elif action == "cancel" and bench.tasks:
                bench.tasks[sorted(bench.tasks)[which % len(bench.tasks)]].cancel()
                await bench.settle()
            elif action == "stale":
                bench.fleet.refused(member, turn=member.num_turns)
            elif action == "served":
                bench.fleet.served([member])
            before = [m.num_in_flight for m in bench.fleet.members]
            if action in ("full", "roomy"):
                bench.places.report(member, ServerLoad(cache_share=0.95 if action == "full" else 0.5))
            await bench.settle()
            loads = [m.num_in_flight for m in bench.fleet.members]
            held = list(bench.where.values())
            assert loads == [held.count(m) for m in bench.fleet.members]
            assert max(loads) <= 5
            bounds = [bench.places.bounds[m].now for m in bench.fleet.members]
            assert all(load <= max(bound, earlier) for load, bound, earlier in zip(loads, bounds, before, strict=True))
            if bench.places.num_waiting:
                assert all(m.num_in_flight >= bench.places.bounds[m].now for m in bench.fleet.healthy())
        await bench.end_all()
        assert [m.num_in_flight for m in bench.fleet.members] == [0] * num_servers
        assert bench.places.num_waiting == 0

    asyncio.run(scenario())


@settings(max_examples=25, deadline=None)
@given(sessions=st.lists(st.integers(0, 5), min_size=20, max_size=80), ends=st.randoms(use_true_random=False))
def test_in_order_but_for_those_whose_home_is_the_server(sessions, ends):
    async def scenario():
        bench = Bench(3)
        numbers = {await bench.start(f"g{session}"): session for session in sessions}
        while bench.where:
            homes = dict(bench.places._homes)
            waiting = [n for n in numbers if n not in bench.order]
            ended = ends.choice(sorted(bench.where))
            member, num_before = bench.where[ended], len(bench.order)
            await bench.end(ended)
            for taken in bench.order[num_before:]:
                if taken != waiting[0]:
                    assert homes.get(f"g{numbers[taken]}", member) is member
                    assert homes[f"g{numbers[waiting[0]]}"] is not member
        assert sorted(bench.order) == sorted(numbers)
        await bench.end_all()

    asyncio.run(scenario())


def test_in_order_is_never_more_than_the_look_ahead_behind():
    """The first that waits has its home on a server that stays full."""

    async def scenario():
        bench = Bench(2, max_running=1, max_queued=0)
        full = await bench.start("a")
        on_other = await bench.start("b")
        first = await bench.start("a")
        later = [await bench.start("b") for _ in range(2 * LOOK_AHEAD)]
        for number in [on_other, *later]:
            if first in bench.order:
                break
            await bench.end(number)
        overtook = bench.order.index(first) - bench.order.index(on_other) - 1
        where = bench.where[first]
        await bench.end(full)
        await bench.end_all()
        return overtook, where

    overtook, where = asyncio.run(scenario())
    assert overtook == LOOK_AHEAD - 1
    assert where.engine.name == "s1"


def test_a_session_stays_on_its_server_until_that_has_a_quarter_more_than_the_least_loaded():
    async def scenario():
        bench = Bench(2, max_running=16)
        numbers = [await bench.start("a") for _ in range(12)]
        names = [bench.where[number].engine.name for number in numbers]
        await bench.end_all()
        return names

    # 5 on s0 (4 more than none, then one), the sixth finds 5 against 0; from then on its home is s1
    assert asyncio.run(scenario()) == ["s0"] * 5 + ["s1"] * 7


def test_sessions_that_differ_are_spread():
    async def scenario():
        bench = Bench(3)
        names = [bench.where[await bench.start(f"g{index}")].engine.name for index in range(6)]
        await bench.end_all()
        return names

    assert asyncio.run(scenario()) == ["s0", "s1", "s2"] * 2


def test_all_who_wait_hear_that_no_server_is_left():
    async def scenario():
        bench = Bench(1, max_running=1, max_queued=0)
        await bench.start("a")
        waiting = [await bench.start("a") for _ in range(3)]
        member = bench.fleet.members[0]
        member.gone = EngineError("server-0 was killed")
        bench.fleet._enter(member, "dead")
        for number in waiting:
            with pytest.raises(EngineError, match=r"no rollout server is left .*server-0 was killed"):
                await bench.tasks[number]
        return bench.places.num_waiting

    assert asyncio.run(scenario()) == 0
