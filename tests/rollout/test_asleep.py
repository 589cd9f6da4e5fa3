"""What a server whose memory is partly given back still does, for every engine."""

import asyncio

import pytest
from tiny_servers import until

from moerl.types.completion import SamplingParams
from moerl.types.errors import EngineError, EngineUnavailable, WeightError

PROMPT = (5, 17, 3, 42, 8)
LONG = 200


def ask(served, name, max_tokens=8):
    return asyncio.create_task(served.engine.generate(PROMPT, SamplingParams(max_tokens=max_tokens, seed=3), name))


def test_a_push_goes_to_a_server_without_a_cache_which_answers_once_it_has_one_again(run, served):
    async def scenario():
        engine = served.engine
        num_bytes = await engine.sleep()
        states = [await engine.health()]
        num_bytes -= await engine.wake(("weights",))
        states.append(await engine.health())
        await served.push(2)
        states.append(await engine.health())
        with pytest.raises(EngineUnavailable, match="asleep"):
            await ask(served, "early")
        num_bytes -= await engine.wake(("cache",))
        return num_bytes, [(state.status, state.asleep, state.version) for state in states], await ask(served, "late")

    num_bytes, states, completion = run(scenario())
    assert num_bytes == 0
    assert states == [("stale", ("cache", "weights"), None), ("stale", ("cache",), None), ("asleep", ("cache",), 2)]
    assert [span.version for span in completion.spans] == [2]


def test_a_push_to_a_server_without_memory_for_weights_is_refused_and_changes_nothing(run, served):
    async def scenario():
        engine = served.engine
        await engine.sleep()
        with pytest.raises(WeightError, match="its weights are asleep"):
            await served.push(2)
        await engine.wake()
        state = await engine.health()
        await served.push(3)
        return state, await ask(served, "after")

    state, completion = run(scenario())
    assert (state.status, state.asleep) == ("stale", ())
    assert [span.version for span in completion.spans] == [3]


def test_a_server_without_a_cache_keeps_its_weights(run, served):
    async def scenario():
        await served.engine.sleep(("cache",))
        state = await served.engine.health()
        await served.engine.wake(("cache",))
        return state, await ask(served, "after")

    state, completion = run(scenario())
    assert (state.status, state.version) == ("asleep", 1)
    assert [span.version for span in completion.spans] == [1]


def test_a_cache_that_running_requests_need_is_not_given_up(run, served):
    async def scenario():
        engine = served.engine
        task = ask(served, "long", LONG)
        await until(engine, lambda health: health.num_running == 1)
        await engine.pause("keep")
        with pytest.raises(EngineError, match="sleep with 1 running requests: their keys and values would be lost"):
            await engine.sleep()
        with pytest.raises(EngineError, match="sleep of the weights alone: what is cached is of these weights, and goes with them"):
            await engine.sleep(("weights",))
        await engine.resume()
        return await task

    assert len(run(scenario()).token_ids) == LONG
