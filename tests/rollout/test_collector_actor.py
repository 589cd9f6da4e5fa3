"""The process that receives completions, in this one: what it does when something goes wrong between a request and its answer."""

import asyncio
import pickle
import threading

import pytest
from canned_server import Letters
from test_fleet import until

from moerl.cluster.run_secret import RunSecret
from moerl.rollout.fleet import collector_actor
from moerl.rollout.fleet.collector import Intake
from moerl.rollout.fleet.collector_actor import CollectorActor
from moerl.rollout.server.client import BrokenConnection
from moerl.rollout.server.messages import dump_requests
from moerl.rollout.server.wire import GenerateRequest
from moerl.types.completion import Completion, SamplingParams, VersionSpan
from moerl.types.errors import MoerlError, StoreError
from moerl.types.stored import StoredCompletion


@pytest.fixture(autouse=True)
def unconnected(monkeypatch):
    monkeypatch.setattr(CollectorActor, "_connected", lambda self: None)


class Elsewhere:
    """A payload that comes when `come` says so, or is lost."""

    def __init__(self):
        self.come = threading.Event()

    def get(self):
        self.come.wait(10)
        raise StoreError("samples were lost")


def so_far(payload):
    return StoredCompletion(
        request_id="r0", num_tokens=1, num_prompt=2, spans=(), finish_reason="abort", routes_bytes=0, num_bytes=9, payload=payload
    )


def submitted(*numbers):
    requests = [GenerateRequest(request_id=f"r{n}", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=1, seed=n)) for n in numbers]
    return pickle.dumps(("http://127.0.0.1:1", "s", list(numbers), dump_requests(requests)))


def new_actor():
    actor = CollectorActor(RunSecret.new(), None)
    actor._intake = Intake(vocab_size=9, decoder=Letters())
    return actor


def answer(number):
    spans = (VersionSpan(version=1, num_tokens=1),)
    return Completion(request_id=f"r{number}", token_ids=(3,), logprobs=(-1.0,), spans=spans, finish_reason="length")


def test_a_lost_beginning_of_a_completion_is_told_to_who_waits_for_its_end(run):
    async def scenario():
        actor, lost = new_actor(), Elsewhere()
        lost.come.set()
        await actor.submit([], submitted(0), {0: so_far(lost)})
        await asyncio.wait_for(actor._arrived.wait(), 10)
        return actor._ready[0], actor._asked

    outcome, asked = run(scenario())
    assert isinstance(outcome, StoreError) and "samples were lost" in str(outcome) and asked == {}


def test_what_is_dropped_before_its_beginning_is_here_is_not_asked_for(run, monkeypatch):
    async def scenario():
        monkeypatch.setattr(collector_actor, "generate_at", None)  # nobody may call it
        monkeypatch.setattr(CollectorActor, "_abort", lambda self, url, server, ids: asyncio.sleep(0))
        actor, beginning = new_actor(), Elsewhere()
        await actor.submit([], submitted(0), {0: so_far(beginning)})
        exchange = actor._asked[0].exchange
        await actor.drop([0])
        beginning.come.set()
        await asyncio.wait([exchange])
        return exchange.cancelled(), actor._asked, actor._ready

    assert run(scenario()) == (True, {}, {})


def test_an_answer_that_is_being_checked_outlives_the_connection_it_came_over(run, monkeypatch):
    async def one_of_two(session, url, server, requests, data):
        yield 0, answer(0)
        raise BrokenConnection("s: /generate failed, the server still runs")

    async def scenario():
        monkeypatch.setattr(collector_actor, "generate_at", one_of_two)
        actor, checked = new_actor(), asyncio.Event()
        received = Intake.received

        async def slowly(intake, more, request, before, *, server):
            await checked.wait()
            return await received(intake, more, request, before, server=server)

        monkeypatch.setattr(Intake, "received", slowly)
        await actor.submit([], submitted(0, 1), {})
        await until(lambda: 1 in actor._ready)
        checked.set()
        await until(lambda: 0 in actor._ready)
        return actor._ready

    ready = run(scenario())
    completion, payload = ready[0]
    assert (completion.token_ids, payload.text) == ((3,), "d")
    assert isinstance(ready[1], BrokenConnection)


def test_a_bug_ends_every_request_of_a_message_and_stands_once_in_the_log(run, monkeypatch, caplog):
    async def fail(session, url, server, requests, data):
        raise KeyError("a bug")
        yield

    async def scenario():
        monkeypatch.setattr(collector_actor, "generate_at", fail)
        actor = new_actor()
        await actor.submit([], submitted(0, 1, 2), {})
        await until(lambda: len(actor._ready) == 3)
        return actor._ready

    assert {str(outcome) for outcome in run(scenario()).values()} == {"a process that receives completions failed: KeyError: 'a bug'"}
    assert [record.message for record in caplog.records if record.exc_info] == ["an answer could not be received"]


def test_a_number_that_is_here_is_not_asked_again(run, monkeypatch):
    asked = []

    async def note(session, url, server, requests, data):
        asked.extend(request.request_id for request in requests)
        for place, request in enumerate(requests):
            yield place, answer(int(request.request_id[1:]))

    async def scenario():
        monkeypatch.setattr(collector_actor, "generate_at", note)
        actor = new_actor()
        for numbers in [(0, 1), (1, 2), (0, 2)]:
            await actor.submit([], submitted(*numbers), {})
        await until(lambda: len(actor._ready) == 3)
        assert not any(isinstance(outcome, MoerlError) for outcome in actor._ready.values())

    run(scenario())
    assert asked == ["r0", "r1", "r2"]
