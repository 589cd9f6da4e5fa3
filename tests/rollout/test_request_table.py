"""Requests of a server on an engine that answers when it is told: which begins, and when."""

import asyncio

import pytest

from moerl.rollout.server.contract import Core
from moerl.rollout.server.server_state import ServerState
from moerl.types.completion import Completion, SamplingParams, ServerLoad
from moerl.types.errors import EngineError


class ToldCore(Core):
    def __init__(self):
        self.begun: list[int] = []
        self.ends: dict[str, asyncio.Event] = {}

    async def generate(self, key, prompt_ids, sampling, salt):
        self.begun.append(prompt_ids[0])
        self.ends[key] = asyncio.Event()
        await self.ends[key].wait()
        return Completion(request_id=key, token_ids=(1,), logprobs=(-1.0,), spans=(), finish_reason="stop")

    async def abort(self, key):
        self.ends[key].set()

    def load(self):
        return ServerLoad()

    async def hold(self): ...

    async def release(self): ...

    def close(self): ...

    def end_all(self):
        for end in self.ends.values():
            end.set()


def ask(state, number, **sampling):
    asked = state.generate((number,), SamplingParams(max_tokens=4, seed=0, **sampling), f"request-{number}")
    return asyncio.ensure_future(asked)


async def turns(number=5):
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_turns", [0, 1, 3])
def test_a_request_that_nobody_waits_for_any_more_never_begins(run, num_turns):
    async def scenario():
        core = ToldCore()
        state = ServerState(core, max_running=1, version=1)
        await state.pause("keep")
        first, second = ask(state, 1), ask(state, 2)
        await turns()
        first.cancel()
        await turns(num_turns)
        await state.resume()
        await turns()
        assert core.begun == [2]
        health = await state.health()
        assert (health.num_running, health.num_waiting) == (1, 0)
        core.end_all()
        assert (await second).finish_reason == "stop"
        again = ask(state, 1)  # its name is free
        await turns()
        core.end_all()
        assert (await again).token_ids == (1,)

    run(scenario())


def test_requests_begin_in_the_order_they_came_in_but_those_that_go_first(run):
    async def scenario():
        core = ToldCore()
        state = ServerState(core, max_running=1, version=1)
        await state.pause("keep")
        asked = [ask(state, 1), ask(state, 2), ask(state, 3, goes_first=True), ask(state, 4), ask(state, 5, goes_first=True)]
        await turns()
        await state.resume()
        for _ in asked:
            await turns()
            core.end_all()
        await asyncio.gather(*asked)
        assert core.begun == [3, 5, 1, 2, 4]

    run(scenario())


@pytest.mark.parametrize("runs", [True, False], ids=["running", "waiting"])
def test_the_newer_of_two_requests_of_one_name_is_answered(run, runs):
    """The older one has lost its connection, or whoever asked is about to drop it: the run must not end for it."""

    async def scenario():
        core = ToldCore()
        state = ServerState(core, max_running=1, version=1)
        if not runs:
            await state.pause("keep")
        older = ask(state, 1)
        await turns()
        newer = ask(state, 1)
        await turns()
        await state.resume()
        await turns()
        assert older.done() and not newer.done()
        assert len(core.begun) == 1 + runs
        core.end_all()
        assert (await newer).token_ids == (1,)
        health = await state.health()
        assert (health.num_running, health.num_waiting) == (0, 0)

    run(scenario())


def test_an_error_of_the_engine_is_logged_with_its_place(run, caplog):
    class Failing(ToldCore):
        async def generate(self, key, prompt_ids, sampling, salt):
            raise ZeroDivisionError("of the adapter")

    async def scenario():
        with pytest.raises(EngineError, match="request-1: the engine failed: ZeroDivisionError: of the adapter"):
            await ask(ServerState(Failing(), max_running=1, version=1), 1)

    run(scenario())
    [record] = caplog.records
    assert record.exc_info[2].tb_next is not None and "request-1" in record.getMessage()
