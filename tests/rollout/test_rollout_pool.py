"""Routing, deadlines and commands to several servers, over fake engines."""

import asyncio

import pytest
from tiny_servers import new_fake, push

from moerl.rollout.pool import RolloutPool
from moerl.types import EngineError, SamplingParams

SAMPLING = SamplingParams(max_tokens=8, seed=3)
PROMPT = (1, 2, 3)


@pytest.fixture
def engines(run, checkpoints):
    engines = [new_fake(checkpoints["dense"]) for _ in range(3)]
    for index, engine in enumerate(engines):
        engine.name = f"fake-{index}"
    yield engines
    for engine in engines:
        run(engine.close())


@pytest.fixture
def pool(run, engines, checkpoints):
    pool = RolloutPool(engines, request_seconds=30)

    async def begin():
        await pool.start()
        for engine in engines:
            await push(engine, checkpoints["dense"].tensors, 1)
        pool.fleet.served(pool.fleet.members)

    run(begin())
    yield pool
    run(pool.close())


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def loads(pool):
    return [health.num_running + health.num_waiting for health in (await pool.healths()).values()]


def test_requests_go_to_the_least_loaded_server_and_ties_to_the_first(run, pool):
    async def scenario():
        await pool.pause("keep")
        first = [asyncio.create_task(pool.generate(PROMPT, SAMPLING, f"a{i}")) for i in range(7)]
        await settle()
        before = await loads(pool)
        await pool.abort(("a1", "a4"))
        await asyncio.gather(first[1], first[4])
        more = [asyncio.create_task(pool.generate(PROMPT, SAMPLING, f"b{i}")) for i in range(2)]
        await settle()
        after = await loads(pool)
        await pool.resume()
        completions = await asyncio.gather(*first, *more)
        return before, after, completions, await loads(pool)

    before, after, completions, end = run(scenario())
    assert before == [3, 2, 2]
    assert after == [3, 2, 2]
    assert end == [0, 0, 0]
    assert sum(completion.finish_reason == "abort" for completion in completions) == 2


def test_the_server_does_not_influence_the_completion(run, pool):
    async def scenario():
        return await asyncio.gather(*(pool.generate(PROMPT, SAMPLING, f"r{i}") for i in range(9)))

    assert len({completion.token_ids for completion in run(scenario())}) == 1


def test_a_request_past_its_deadline_names_server_and_request_and_is_dropped(run, engines, pool):
    async def scenario():
        hasty = RolloutPool(engines, request_seconds=0.05)
        hasty.fleet.served(hasty.fleet.members)
        await hasty.pause("keep")
        with pytest.raises(EngineError, match=r"fake-0: slow took longer than rollout.request_seconds = 0.05"):
            await hasty.generate(PROMPT, SAMPLING, "slow")
        await settle()
        after = await loads(hasty)
        await hasty.resume()
        return after, (await hasty.generate(PROMPT, SAMPLING, "next")).finish_reason

    assert run(scenario()) == ([0, 0, 0], "length")


def test_commands_reach_every_server(run, pool):
    async def scenario():
        statuses = []
        for command in (pool.pause("wait"), pool.resume(), pool.sleep(), pool.wake()):
            await command
            statuses.append({health.status for health in (await pool.healths()).values()})
        return statuses

    assert run(scenario()) == [{"paused"}, {"healthy"}, {"asleep"}, {"healthy"}]


def test_all_failures_are_reported_together(run, engines, pool):
    run(engines[0].close())
    run(engines[2].close())
    with pytest.raises(EngineError, match=r"(?s)pause failed on 2 of 3 servers\n\* fake-0: .*\n\* fake-2: "):
        run(pool.pause("keep"))
    assert run(engines[1].health()).status == "paused"


def test_a_failed_start_closes_the_servers_that_came_up(run, engines):
    class Broken:
        name = "broken"

        async def start(self):
            raise EngineError("broken: cannot start")

        async def close(self):
            pass

    pool = RolloutPool([engines[0], Broken()], request_seconds=1)
    with pytest.raises(EngineError, match=r"start failed on 1 of 2 servers\n\* broken: cannot start"):
        run(pool.start())
    with pytest.raises(EngineError, match="not running"):
        run(engines[0].health())


def test_a_pool_needs_a_server():
    with pytest.raises(EngineError, match="num_servers = 0"):
        RolloutPool([], request_seconds=1)
