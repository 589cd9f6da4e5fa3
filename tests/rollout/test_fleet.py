"""Servers that end, hang and come back, over fake engines: no request is lost, and none is served by weights nobody verified."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from tiny_servers import MAX_RUNNING, collector, new_fake, push, whole

from moerl.rollout.fleet.fleet import NUM_PROBES
from moerl.rollout.fleet.rollout_pool import MAX_ATTEMPTS, RolloutPool
from moerl.rollout.server.contract import EngineRefuses
from moerl.types.completion import SamplingParams
from moerl.types.errors import EngineError

SAMPLING = SamplingParams(max_tokens=8, seed=3)
PROMPT = (1, 2, 3)


@asynccontextmanager
async def serving(checkpoints, num_servers, **options):
    """A started pool whose servers hold version 1."""
    engines = [new_fake(checkpoints["dense"]) for _ in range(num_servers)]
    for index, engine in enumerate(engines):
        engine.name = f"fake-{index}"
    pool = RolloutPool(
        engines,
        **{
            "max_running": MAX_RUNNING,
            "max_queued": 2,
            "collector": collector(),
            "request_seconds": 30,
            "max_restarts": 2,
            "probe_seconds": 30,
            **options,
        },
    )
    try:
        await pool.start()
        await bring(pool, checkpoints, 1)
        yield pool, engines
    finally:
        await pool.close()


async def bring(pool, checkpoints, version):
    members = pool.fleet.running()
    for member in members:
        await push(member.engine, checkpoints["dense"].tensors, version)
    pool.fleet.served(members)


def states(pool):
    return [member.state for member in pool.fleet.members]


async def turns(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


async def until(is_true):
    for _ in range(20_000):
        if is_true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never became true")


def test_requests_of_a_server_that_ends_are_run_on_another_with_the_same_result(run, checkpoints):
    async def scenario():
        async with serving(checkpoints, 2) as (pool, engines):
            expected = await pool.generate(PROMPT, SAMPLING, "undisturbed")
            await pool.pause("keep")
            held = [asyncio.create_task(pool.generate(PROMPT, SAMPLING, f"r{i}")) for i in range(6)]
            await turns()
            engines[0].kill()
            await pool.resume([pool.fleet.members[1]])
            completions = await asyncio.gather(*held)
            assert [answer.completion.request_id for answer in completions] == [f"r{i}" for i in range(6)]
            assert {whole(answer).token_ids for answer in completions} == {whole(expected).token_ids}
            assert pool.fleet.num_restarts == 1
            assert [member.num_in_flight for member in pool.fleet.members] == [0, 0]

    run(scenario())


def test_a_restarted_server_is_stale_and_gets_no_request_before_a_push(run, checkpoints):
    async def scenario():
        async with serving(checkpoints, 1) as (pool, engines):
            engines[0].kill()
            await until(lambda: states(pool) == ["stale"])
            waiting = asyncio.create_task(pool.generate(PROMPT, SAMPLING, "waits"))
            await turns()
            assert (await engines[0].health()).num_waiting == 0
            assert not waiting.done()
            await bring(pool, checkpoints, 2)
            assert states(pool) == ["healthy"]
            assert [span.version for span in (await waiting).completion.spans] == [2]

    run(scenario())


def test_the_last_server_that_ends_too_often_ends_every_request_with_its_last_words(run, checkpoints):
    async def scenario():
        async with serving(checkpoints, 2, max_restarts=1) as (pool, engines):
            for engine in engines:
                engine.kill()
                await until(lambda: "stale" in states(pool))
                await bring(pool, checkpoints, 2)
            engines[0].kill()
            await until(lambda: states(pool) == ["dead", "healthy"])
            assert (await pool.generate(PROMPT, SAMPLING, "on the other")).completion.finish_reason == "length"
            engines[1].kill()
            with pytest.raises(EngineError, match=r"no rollout server is left \(rollout.max_restarts = 1\): fake-0: the server ended"):
                await pool.generate(PROMPT, SAMPLING, "nowhere")
            with pytest.raises(EngineError, match="no rollout server is left"):
                await pool.fleet.until_stale()

    run(scenario())


def test_a_server_that_does_not_answer_is_suspected_then_ended_and_its_requests_go_elsewhere(run, checkpoints, monkeypatch):
    async def scenario():
        async with serving(checkpoints, 2, probe_seconds=0.05) as (pool, engines):
            await engines[0].pause("keep")
            held = asyncio.create_task(pool.generate(PROMPT, SAMPLING, "held"))
            await turns()
            seen, answers = [], engines[0].health

            async def silence():
                seen.append(states(pool)[0])
                await asyncio.sleep(0.01 if len(seen) == 1 else 60)
                return await answers()

            monkeypatch.setattr(engines[0], "health", silence)
            await until(lambda: states(pool)[0] == "suspect")
            assert (await pool.generate(PROMPT, SAMPLING, "goes to the other")).completion.finish_reason == "length"
            await until(lambda: states(pool)[0] in ("restarting", "stale"))
            monkeypatch.setattr(engines[0], "health", answers)
            assert seen == ["healthy", "healthy"] + ["suspect"] * (NUM_PROBES - 1)
            assert (await held).completion.finish_reason == "length"

    run(scenario())


def test_a_server_that_answers_again_serves_as_before(run, checkpoints, monkeypatch):
    async def scenario():
        async with serving(checkpoints, 1, probe_seconds=0.05) as (pool, engines):
            health = engines[0].health

            async def silence():
                await asyncio.sleep(60)

            monkeypatch.setattr(engines[0], "health", silence)
            await until(lambda: states(pool) == ["suspect"])
            monkeypatch.setattr(engines[0], "health", health)
            await until(lambda: states(pool) == ["healthy"])
            assert pool.fleet.num_restarts == 0

    run(scenario())


def test_a_request_that_ends_every_server_is_given_up(run, checkpoints, monkeypatch):
    async def scenario():
        async with serving(checkpoints, 1, max_restarts=100) as (pool, engines):
            generate = engines[0].generate

            async def poisoned(*args):
                task = asyncio.create_task(generate(*args))
                await turns(3)
                engines[0].kill()
                return await task

            monkeypatch.setattr(engines[0], "generate", poisoned)
            request = asyncio.create_task(pool.generate(PROMPT, SAMPLING, "poison"))
            while not request.done():
                if states(pool) == ["stale"]:
                    await bring(pool, checkpoints, 2)
                await asyncio.sleep(0.001)
            with pytest.raises(EngineError, match="poison: the server ended"):
                await request
            await until(lambda: pool.fleet.num_restarts == MAX_ATTEMPTS)

    run(scenario())


def test_the_end_of_a_server_is_no_refusal_after_which_it_would_get_a_push(run, checkpoints):
    async def scenario():
        async with serving(checkpoints, 2) as (pool, engines):
            seen = []
            pool.fleet.on_change.append(lambda: seen.append(states(pool)[0]))
            calls = [asyncio.create_task(pool.generate(PROMPT, SAMPLING, f"r{i}")) for i in range(6)]
            await turns(3)
            engines[0].kill()
            await asyncio.gather(*calls)
            return seen

    assert run(scenario())[:2] == ["suspect", "dead"]


@pytest.mark.parametrize("meanwhile", ["its GPUs came back", "a push", "nothing"])
def test_a_refusal_that_arrives_late_says_nothing_about_a_server_that_serves_again(run, checkpoints, monkeypatch, meanwhile):
    async def scenario():
        async with serving(checkpoints, 1) as (pool, engines):
            generate, refuse = engines[0].generate, asyncio.Event()

            async def late(prompt_ids, sampling, request_id):
                monkeypatch.setattr(engines[0], "generate", generate)
                await refuse.wait()
                raise EngineRefuses(f"fake-0: {request_id} refused, the server is asleep; wake it first")

            monkeypatch.setattr(engines[0], "generate", late)
            request = asyncio.create_task(pool.generate(PROMPT, SAMPLING, "r"))
            await turns()
            if meanwhile == "its GPUs came back":
                await pool.fleet.lend(pool.fleet.members)
                pool.fleet.take_back(pool.fleet.members)
            elif meanwhile == "a push":
                await bring(pool, checkpoints, 2)
            refuse.set()
            await turns()
            found = states(pool)
            await bring(pool, checkpoints, 3)
            await request
            return found

    assert run(scenario()) == ["stale" if meanwhile == "nothing" else "healthy"]


def test_however_often_a_request_comes_too_late_it_is_run_in_the_end(run, checkpoints, monkeypatch):
    async def scenario():
        async with serving(checkpoints, 1) as (pool, engines):
            generate, asked = engines[0].generate, []

            async def late(prompt_ids, sampling, request_id):
                asked.append(request_id)
                if len(asked) > MAX_ATTEMPTS:
                    return await generate(prompt_ids, sampling, request_id)
                await pool.fleet.lend(pool.fleet.members)
                pool.fleet.take_back(pool.fleet.members)
                raise EngineRefuses(f"fake-0: {request_id} refused, the server is asleep; wake it first")

            monkeypatch.setattr(engines[0], "generate", late)
            await pool.generate(PROMPT, SAMPLING, "r")
            assert states(pool) == ["healthy"]

    run(scenario())


def test_a_server_that_cannot_be_started_again_uses_up_its_restarts(run, checkpoints, monkeypatch):
    async def scenario():
        async with serving(checkpoints, 1, max_restarts=2) as (pool, engines):

            async def fail():
                raise EngineError("fake-0: no memory")

            monkeypatch.setattr(engines[0], "start", fail)
            engines[0].kill()
            with pytest.raises(EngineError, match="no rollout server is left.*fake-0: no memory"):
                await pool.generate(PROMPT, SAMPLING, "r")
            assert pool.fleet.num_restarts == 2

    run(scenario())


@pytest.mark.parametrize("moment", ["closing", "lent", "starting"])
def test_a_server_that_is_retired_while_it_is_being_started_again_stays_dead(run, checkpoints, monkeypatch, moment):
    """As for the tokens that it sampled before it ended. `kill` finds no process then."""

    async def scenario():
        async with serving(checkpoints, 2) as (pool, engines):
            member, others = pool.fleet.members[0], asyncio.Event()
            verb = {"closing": "close", "starting": "start"}.get(moment)
            if verb is None:
                await pool.fleet.lend([member])
            else:
                upstream = getattr(engines[0], verb)

                async def late():
                    await others.wait()
                    await upstream()

                monkeypatch.setattr(engines[0], verb, late)
            engines[0].kill()
            await until(lambda: states(pool)[0] == "restarting")
            await turns()
            pool.fleet.retire(member, EngineError("fake-0: other log-probs"))
            others.set()
            await until(lambda: member.gone is not None)
            pool.fleet.take_back([member])
            await turns()
            assert states(pool) == ["dead", "healthy"]
            assert str(member.gone) == "fake-0: other log-probs"

    run(scenario())


def test_an_unexpected_failure_of_a_restart_reaches_whoever_waits(run, checkpoints, monkeypatch):
    async def scenario():
        async with serving(checkpoints, 1) as (pool, engines):

            async def fail():
                raise OSError("no space left for the log")

            monkeypatch.setattr(engines[0], "start", fail)
            engines[0].kill()
            with pytest.raises(OSError, match="no space left for the log"):
                await pool.generate(PROMPT, SAMPLING, "r")

    run(scenario())


def test_closing_restarts_nothing(run, checkpoints):
    async def scenario():
        async with serving(checkpoints, 2) as (pool, engines):
            await pool.close()
            await turns()
            assert pool.fleet.num_restarts == 0
            for engine in engines:
                with pytest.raises(EngineError, match="not running"):
                    await engine.health()

    run(scenario())


def test_a_server_that_answers_probes_and_no_command_is_ended_and_started_again(run, checkpoints, monkeypatch):
    """As one whose engine hangs in a process of its own."""

    async def scenario():
        async with serving(checkpoints, 2, command_seconds=0.2, probe_seconds=0.05) as (pool, engines):
            monkeypatch.setattr(engines[0], "pause", lambda mode: asyncio.sleep(3600))
            with pytest.raises(EngineError, match=r"on 1 of 2 servers\n\* fake-0: no answer to pause within 0\.2 s \(deadlines\.push_sec"):
                await pool.pause("keep")
            await until(lambda: states(pool) == ["stale", "healthy"])
            return [member.num_starts for member in pool.fleet.members]

    assert run(scenario()) == [2, 1]


def test_a_driver_that_stood_still_takes_the_answers_that_came_meanwhile(run, checkpoints, monkeypatch):
    """As after Ctrl-Z: the completion ended the run, and a healthy server was ended for its pause."""

    async def scenario():
        async with serving(checkpoints, 1, request_seconds=0.5, command_seconds=0.5) as (pool, engines):
            for name in ("generate", "pause"):
                monkeypatch.setattr(engines[0], name, answering(getattr(engines[0], name)))
                asyncio.get_running_loop().call_later(0.02, time.sleep, 0.6)
                await (pool.generate(PROMPT, SAMPLING, "r0") if name == "generate" else pool.pause("keep"))
            return [member.num_starts for member in pool.fleet.members]

    def answering(call):
        async def after_a_moment(*arguments):
            answer = asyncio.create_task(asyncio.sleep(0.1))
            await answer
            return await call(*arguments)

        return after_a_moment

    assert run(scenario()) == [1]
