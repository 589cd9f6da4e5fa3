"""Routing, deadlines and commands to several servers, over fake engines."""

import asyncio
import sys
from dataclasses import replace

import pytest
from tiny_servers import MAX_RUNNING, ROUTES, VOCAB, collector, new_fake, push, whole

from moerl.cluster.run_secret import RunSecret
from moerl.rollout.fleet.collector import Answer
from moerl.rollout.fleet.completion_check import check_routes
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.rollout.server.client import HTTPEngine
from moerl.rollout.server.messages import dump_frame
from moerl.rollout.server.spread_process import NodeOfServer
from moerl.rollout.server.wire import GenerateRequest
from moerl.types.completion import Completion, SamplingParams, VersionSpan
from moerl.types.errors import EngineError, EngineUnsound
from moerl.types.stored import Here, Payload, StoredCompletion

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
    pool = RolloutPool(engines, max_running=MAX_RUNNING, max_queued=2, collector=collector(), request_seconds=30)

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
        for index in (4, 1):
            first.pop(index).cancel()
        await settle()
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
    assert [answer.completion.finish_reason for answer in completions] == ["length"] * 7


def test_the_server_does_not_influence_the_completion(run, pool):
    async def scenario():
        return await asyncio.gather(*(pool.generate(PROMPT, SAMPLING, f"r{i}") for i in range(9)))

    assert len({whole(answer).token_ids for answer in run(scenario())}) == 1


def test_a_request_past_its_deadline_names_server_and_request_and_is_dropped(run, engines, pool):
    async def scenario():
        hasty = RolloutPool(engines, max_running=MAX_RUNNING, max_queued=2, collector=collector(), request_seconds=0.05)
        hasty.fleet.served(hasty.fleet.members)
        await hasty.pause("keep")
        with pytest.raises(EngineError, match=r"fake-0: slow took longer than deadlines.completion_seconds = 0.05"):
            await hasty.generate(PROMPT, SAMPLING, "slow")
        await settle()
        after = await loads(hasty)
        await hasty.resume()
        return after, (await hasty.generate(PROMPT, SAMPLING, "next")).completion.finish_reason

    assert run(scenario()) == ([0, 0, 0], "length")


def test_a_request_that_waits_too_long_for_servers_that_are_busy_says_so(run, engines, pool):
    async def scenario():
        hasty = RolloutPool(engines[:1], max_running=1, max_queued=0, collector=collector(), request_seconds=0.2)
        hasty.fleet.served(hasty.fleet.members)
        await hasty.pause("keep")
        first, second = await asyncio.gather(
            *(hasty.generate(PROMPT, SAMPLING, name) for name in ("running", "waiting")), return_exceptions=True
        )
        await hasty.resume()
        return str(first), str(second)

    first, second = run(scenario())
    assert first.startswith("fake-0: running took longer than deadlines.completion_seconds = 0.2;")
    assert second.startswith("waiting got no server within deadlines.completion_seconds = 0.2; fake-0 is healthy")
    assert "and 1 waited. The wait in the driver counts" in second and "rollout.max_running" in second


def test_a_request_that_is_ended_before_its_first_token_has_nothing_to_go_on_from(run, pool):
    async def scenario():
        await pool.pause("keep")
        asked = asyncio.create_task(pool.generate(PROMPT, SAMPLING, "r"))
        await settle()
        await pool.abort()
        await settle()
        await pool.resume()
        return (await asked).completion.num_tokens, pool.num_resumed

    assert run(scenario()) == (8, 0)


def test_commands_reach_every_server(run, pool):
    async def scenario():
        statuses = []
        for command in (pool.pause("wait"), pool.resume(), pool.sleep(("cache",)), pool.wake(("cache",))):
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

    pool = RolloutPool([engines[0], Broken()], max_running=MAX_RUNNING, max_queued=2, collector=collector(), request_seconds=1)
    with pytest.raises(EngineError, match=r"start failed on 1 of 2 servers\n\* broken: cannot start"):
        run(pool.start())
    with pytest.raises(EngineError, match="not running"):
        run(engines[0].health())


# -- answers that cannot be right ------------------------------------------------------------------------------

SOUND = Completion(
    request_id="r", token_ids=(5, 6, 7), logprobs=(-1.0, -2.0, 0.0), spans=(VersionSpan(version=1, num_tokens=3),), finish_reason="length"
)


class Answering:
    name = "server-0"

    def __init__(self, answer):
        self._answer = answer

    async def generate(self, prompt_ids, sampling, request_id):
        return self._answer


def ask_for(run, answer):
    sampling = SamplingParams(max_tokens=3, seed=1, stop_token_ids=(6, 7))
    request = GenerateRequest(request_id="r", prompt_ids=PROMPT, sampling=sampling)
    return whole(run(collector().ask(Answering(answer), request, None)))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"request_id": "other"}, "request_id = 'other': must be the request's"),
        ({"token_ids": (5, VOCAB, 7)}, rf"token {VOCAB}: must be in the model's vocabulary \[0, {VOCAB}\)"),
        ({"token_ids": (-1, 5, 7)}, "token -1: must be in the model's vocabulary"),
        ({"logprobs": (-1.0, -2.0)}, "2 log-probs: must be as many as tokens, 3"),
        ({"logprobs": (-1.0, float("nan"), -1.0)}, "log-prob nan: must be a number and at most 0"),
        ({"logprobs": (-1.0, 0.5, -1.0)}, r"log-prob 0\.5: must be a number and at most 0"),
        ({"spans": ()}, "spans of 0 tokens: must be of 3, none empty"),
        (
            {"spans": (VersionSpan(version=1, num_tokens=4), VersionSpan(version=2, num_tokens=-1))},
            "spans of 3 tokens: must be of 3, none empty",
        ),
        ({"spans": (VersionSpan(version=-1, num_tokens=3),)}, r"versions \[-1\] of its spans: must be in \[0, 2\^31\)"),
        ({"spans": (VersionSpan(version=10**30, num_tokens=3),)}, "versions .* of its spans: must be in"),
        (
            {"spans": (VersionSpan(version=2, num_tokens=1), VersionSpan(version=1, num_tokens=2))},
            r"versions \[2, 1\] of its spans: must be in \[0, 2\^31\), in the order of pushes",
        ),
        ({"token_ids": (5, 5, 5, 7), "logprobs": (-1.0,) * 4}, "4 tokens: must be at most max_tokens = 3"),
        ({"token_ids": (5, 5, 5), "finish_reason": "stop"}, "finish_reason = 'stop' with 3 tokens: stop must end with a stop token"),
        ({"token_ids": (5, 5), "logprobs": (-1.0, -1.0)}, "finish_reason = 'length' with 2 tokens: .* length with token 3"),
        ({"token_ids": (5, 6, 7)}, "token 6 at 1: a stop token must be the last"),
    ],
)
def test_an_answer_that_cannot_be_the_requests_names_server_request_and_rule(run, changes, rule):
    sound = replace(SOUND, token_ids=(5, 5, 7))
    with pytest.raises(EngineUnsound, match=rf"server-0: r: the answer cannot be this request's: .*{rule}"):
        ask_for(run, replace(sound, **changes))
    assert ask_for(run, replace(sound, finish_reason="stop")).token_ids == (5, 5, 7)


@pytest.mark.parametrize(
    ("status", "body", "answered"),
    [
        (200, b"<html>", "answered b'<html>'"),
        (200, dump_frame(0, 200, b'{"request_id": "r"}'), "num_tokens"),
        (502, b"Bad Gateway", "answered b'Bad Gateway'"),
    ],
)
def test_an_answer_that_is_no_completion_names_server_and_request(run, tmp_path, status, body, answered):
    code = f"""
import http.server
class Garbage(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response({status})
        self.send_header("content-length", "{len(body)}")
        self.end_headers()
        self.wfile.write({body!r})
server = http.server.HTTPServer(("127.0.0.1", 0), Garbage)
print('{{"port": %d}}' % server.server_port, flush=True)
server.serve_forever()
"""
    engine = HTTPEngine(
        [NodeOfServer(command=[sys.executable, "-c", code])], secret=RunSecret.new(), port=0, log_path=tmp_path / "log", start_seconds=60
    )

    async def scenario():
        await engine.start()
        try:
            with pytest.raises(EngineUnsound, match=rf"(?s){engine.name}: r: answered .*{answered}|{engine.name}: r: {answered}"):
                await engine.generate(PROMPT, SAMPLING, "r")
        finally:
            await engine.close()

    run(scenario())


def test_a_pool_needs_a_server():
    with pytest.raises(EngineError, match="num_servers = 0"):
        RolloutPool([], max_running=MAX_RUNNING, max_queued=2, collector=collector(), request_seconds=1)


class Pushing:
    """A collector during whose first answer weights are pushed to the server that is asked."""

    def __init__(self):
        self.pool, self.asked = None, 0

    async def start(self): ...

    async def close(self): ...

    async def ask(self, engine, request, so_far):
        if self.asked == 0:
            self.pool.fleet.served(self.pool.fleet.members)
        self.asked += 1
        completion = Completion(
            request_id=request.request_id, token_ids=(5,), logprobs=(-1.0,), spans=(VersionSpan(version=1, num_tokens=1),),
            finish_reason="length",
        )  # fmt: skip
        payload = Payload.of(request.prompt_ids, completion, "")
        return Answer(completion=StoredCompletion.of(completion, payload, Here(payload)), text="")


def test_a_completion_says_whether_weights_came_while_its_server_had_it(run, engines):
    """One span does not: the push may have come between two chunks of the prompt."""
    collector = Pushing()
    collector.pool = pool = RolloutPool(engines, max_running=1, max_queued=0, collector=collector, request_seconds=30)

    async def scenario():
        await pool.start()
        pool.fleet.served(pool.fleet.members)
        return [(await pool.generate(PROMPT, SAMPLING, name)).completion.met_push for name in ("during", "after")]

    assert run(scenario()) == [True, False]
    run(pool.close())


class Scripted:
    """A collector whose answers are given: (finish reason, nonce of each part so far, tokens of each)."""

    def __init__(self, answers):
        self._answers, self.asked = iter(answers), []

    async def start(self): ...

    async def close(self): ...

    async def ask(self, engine, request, so_far):
        self.asked.append(engine.name)
        reason, *parts = next(self._answers)
        spans = tuple(VersionSpan(version=1, num_tokens=count, push_id=push_id) for push_id, count in parts)
        completion = Completion(
            request_id=request.request_id, token_ids=(5,) * sum(span.num_tokens for span in spans), spans=spans, finish_reason=reason,
            logprobs=(-1.0,) * sum(span.num_tokens for span in spans),
        )  # fmt: skip
        payload = Payload.of(request.prompt_ids, completion, "")
        return Answer(completion=StoredCompletion.of(completion, payload, Here(payload)), text="")


@pytest.mark.parametrize(
    ("answers", "num_retired"),
    [
        ([("abort", ("fake-0", 3)), ("abort", ("fake-0", 3)), ("length", ("fake-0", 3), ("fake-0", 5))], 0),
        ([("abort", ("fake-0", 3)), ("length", ("fake-0", 3), ("fake-1", 5)), ("length", ("fake-0", 3), ("fake-1", 5))], 1),
        ([("length", ("nobody", 8)), ("length", ("fake-1", 8))], 1),
    ],
)
def test_a_server_is_retired_for_its_own_part_of_a_completion_alone(run, engines, checkpoints, answers, num_retired):
    """Nonces are the names of the servers. A request goes to fake-0 while it lives; one that adds nothing is not blamed."""
    pool = RolloutPool(engines, max_running=1, max_queued=0, collector=Scripted(answers), request_seconds=30)

    async def scenario():
        await pool.start()
        for engine in engines:
            await push(engine, checkpoints["dense"].tensors, 1)
        pool.fleet.served(pool.fleet.members, version=1, push_ids={engine.name: engine.name for engine in engines})
        await pool.generate(PROMPT, SAMPLING, "r")
        return [member.verdict is not None for member in pool.fleet.members]

    assert sum(run(scenario())) == num_retired
    run(pool.close())


@pytest.mark.parametrize("damaged", [lambda routes: routes[:, :1], lambda routes: routes * 0 + 300])
def test_the_server_that_sent_wrong_routes_is_ended_and_not_the_one_that_sends_the_rest(run, engines, pool, monkeypatch, damaged):
    """Else every server that the rest came to was ended, and the run after five, or it ended with the arrays that cannot be joined."""
    pool._collector, sampling = collector(ROUTES["fake"]), replace(SAMPLING, max_tokens=100, returns_routes=True)
    generate = engines[0].generate

    async def wrong(*arguments):
        completion = await generate(*arguments)
        return replace(completion, routes=damaged(completion.routes))

    async def scenario():
        monkeypatch.setattr(engines[0], "generate", wrong)
        asked = asyncio.create_task(pool.generate(PROMPT, sampling, "r"))
        for _ in range(4):
            await settle()
        await pool.abort()
        answer = await asked
        check_routes(whole(answer), num_prompt=len(PROMPT), shape=ROUTES["fake"])
        await settle()
        return [member.state for member in pool.fleet.members]

    assert run(scenario()) == ["dead", "healthy", "healthy"]
    assert "routes of 3 prompt" in str(pool.fleet.members[0].gone)
