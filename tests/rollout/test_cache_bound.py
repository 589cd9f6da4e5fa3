"""The invariants of moerl/rollout/fleet/cache_bound.py, by their names, and the real pool over servers whose cache is finite."""

import asyncio
import sys
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout_pool import Scripted

from moerl.rollout.fleet.cache_bound import CacheBound
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.types.completion import SamplingParams, ServerLoad

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from cached_server import CachedServer
from pool import JumpingClock, collector

PROMPT = tuple(range(20))
FULL, ROOMY = ServerLoad(cache_share=0.95), ServerLoad(cache_share=0.5)


def pool_of(engines, *, max_running, cache_high=0.9):
    pool = RolloutPool(
        engines, max_running=max_running, max_queued=2, collector=collector(), request_seconds=1e9, cache_high=cache_high
    )  # fmt: skip
    pool.fleet.served(pool.fleet.members)
    return pool


def answered(lengths, *, cache_tokens, max_running, cache_high=0.9, reports=True, num_servers=2):
    """The servers, after the pool had all of these answers, and every bound that it saw."""
    seen = []

    async def scenario():
        engines = [
            CachedServer(f"s{index}", num_slots=max_running, cache_tokens=cache_tokens, prefill_rate=100.0, reports=reports)
            for index in range(num_servers)
        ]
        pool = pool_of(engines, max_running=max_running, cache_high=cache_high)

        async def one(index, length):
            await pool.generate(PROMPT, SamplingParams(max_tokens=length, seed=index), f"r-{index}")
            seen.append([(member.num_in_flight, bound.now) for member, bound in pool._places.bounds.items()])

        await asyncio.gather(*(one(index, length) for index, length in enumerate(lengths)))
        assert pool.num_preempted <= sum(engine.num_preempted for engine in engines)
        return engines

    with asyncio.Runner(loop_factory=JumpingClock) as runner:
        return runner.run(scenario()), seen


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60), cache_tokens=st.integers(320, 2000), max_running=st.integers(1, 12),
    cache_high=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
)  # fmt: skip
def test_no_stall_and_in_range_whatever_fits(lengths, cache_tokens, max_running, cache_high):
    """320 tokens are the longest request alone. A stall would be a loop without events, which ends in an error of the loop."""
    _, seen = answered(lengths, cache_tokens=cache_tokens, max_running=max_running, cache_high=cache_high)
    assert len(seen) == len(lengths)
    assert all(1 <= now <= max_running + 2 for each in seen for _, now in each)


def test_a_long_tail_is_computed_again_less_than_with_a_fixed_bound():
    for seed in range(2):
        lengths = np.random.default_rng(seed).lognormal(5.0, 1.0, 600).astype(int).clip(1, 2000).tolist()
        (fixed, _), (bounded, _) = (answered(lengths, cache_tokens=8000, max_running=48, reports=reports) for reports in (False, True))
        again, less = (sum(engine.num_recomputed for engine in engines) for engines in (fixed, bounded))
        assert again > 0.3 * sum(lengths) and less < again / 2


def test_a_cache_with_room_for_all_changes_nothing():
    lengths = np.random.default_rng(0).lognormal(4.0, 1.0, 200).astype(int).clip(1, 2000).tolist()
    _, seen = answered(lengths, cache_tokens=10**6, max_running=8)
    assert {now for each in seen for _, now in each} == {10}


@given(
    most=st.integers(1, 70),
    reports=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5), st.integers(1, 80)), max_size=60),
)
def test_in_range_whatever_is_reported(most, reports):
    bound = CacheBound(most=most, high=0.9)
    for share, num_preempted, num_in_flight in reports:
        bound.report(ServerLoad(cache_share=share, num_preempted=num_preempted), num_in_flight)
        assert 1 <= bound.now <= most


def test_no_cascade_of_reports_of_one_pressure():
    bound = CacheBound(most=10, high=0.9)
    for _ in range(20):  # probes, to which no place is given back
        bound.report(FULL, 8)
    assert bound.now == 7
    bound.report(ROOMY, 7)
    assert bound.now == 8


def test_preemptions_are_pressure_once_and_counted_over_restarts():
    bound = CacheBound(most=10, high=0.9)
    for num_preempted, now in ((3, 9), (3, 10), (4, 9), (0, 10), (2, 9)):  # the fourth: of a process that has just started
        bound.report(ServerLoad(cache_share=0.5, num_preempted=num_preempted), 10)
        assert bound.now == now
    assert bound.num_preempted == 6


def test_an_interrupted_request_counts_and_its_report_does_not(run):
    """It ended because its cache is emptied: what that held says nothing about the next one's."""

    class Full(Scripted):
        async def ask(self, engine, request, so_far):
            answer = await super().ask(engine, request, so_far)
            in_flight.append((pool.fleet.members[0].num_in_flight, pool.least_bound))
            return type(answer)(completion=answer.completion, text="", load=FULL)

    in_flight = []
    pool = RolloutPool(
        [CachedServer("s", num_slots=4, cache_tokens=100, prefill_rate=1.0)],  # never asked: the collector answers
        max_running=4, max_queued=0, collector=Full([("abort",), ("abort",), ("length",)]), request_seconds=30,
    )  # fmt: skip
    pool.fleet.served(pool.fleet.members)
    run(pool.generate(PROMPT, SamplingParams(max_tokens=1, seed=1), "r"))
    assert in_flight == [(1, 4)] * 3
    assert pool.least_bound == 1
