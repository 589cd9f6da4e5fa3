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
        with pytest.raises(EngineUnavailable, match="asleep"):
            await ask(served, "early")
        num_bytes -= await engine.wake(("cache",))
        return num_bytes, [(state.status, state.asleep) for state in states], await ask(served, "late")

    num_bytes, states, completion = run(scenario())
    assert num_bytes == 0
    assert states == [("asleep", ("cache", "weights")), ("asleep", ("cache",))]
    assert [span.version for span in completion.spans] == [2]


def test_a_push_to_a_server_without_weights_is_refused_and_changes_nothing(run, served):
    async def scenario():
        engine = served.engine
        await engine.sleep()
        with pytest.raises(WeightError, match="its weights are asleep"):
            await served.push(2)
        await engine.wake()
        return await ask(served, "after")

    assert [span.version for span in run(scenario()).spans] == [1]


def test_a_cache_that_running_requests_need_is_not_given_up(run, served):
    async def scenario():
        engine = served.engine
        task = ask(served, "long", LONG)
        await until(engine, lambda health: health.num_running == 1)
        await engine.pause("keep")
        with pytest.raises(EngineError, match="sleep with 1 running requests: their keys and values would be lost"):
            await engine.sleep()
        await engine.sleep(("weights",))
        await engine.wake(("weights",))
        await engine.resume()
        return await task

    assert len(run(scenario()).token_ids) == LONG
