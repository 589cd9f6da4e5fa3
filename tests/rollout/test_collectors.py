"""Completions that Ray actors receive from a server over HTTP: what arrives, what stays in the driver, and what a failure says."""

import asyncio
import gc
import json
import os
import signal
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import canned_server
import numpy as np
import pytest
import ray
from canned_server import EXPERTS, LAYERS, TOP_K, VOCAB, Letters, token_at

from moerl.cluster.run_secret import RunSecret
from moerl.hangs.hang_reports import HangReports
from moerl.rollout.fleet.collector import Intake
from moerl.rollout.fleet.ray_collectors import RayCollectors
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.rollout.server.client import HTTPEngine
from moerl.rollout.server.spread_process import NodeOfServer
from moerl.rollout.server.wire import GenerateRequest
from moerl.types.completion import SamplingParams, ServerLoad, VersionSpan
from moerl.types.errors import EngineError, EngineUnavailable, EngineUnsound, HangError, StoreError
from moerl.types.exit_codes import ExitCode
from moerl.types.groups import Group, Prompt, Sample, Score
from moerl.types.routes import RouteShape
from moerl.types.stored import InStore, fetch

PROMPT = (1, 2, 3)
SECRET = RunSecret.new()
INTAKE = Intake(vocab_size=VOCAB, decoder=Letters(), routes=RouteShape(num_layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS))


@pytest.fixture(scope="module")
def collectors(run, shared_ray):
    path = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}  # the actors import what this process can import
    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR", runtime_env=path)
    collectors = RayCollectors(INTAKE, secret=SECRET, num_actors=1, start_seconds=60)
    run(collectors.start())
    yield collectors
    run(collectors.close())
    ray.shutdown()


@pytest.fixture
def engine(run, tmp_path):
    command = [sys.executable, str(Path(canned_server.__file__))]
    engine = HTTPEngine([NodeOfServer(command=command)], secret=SECRET, port=0, log_path=tmp_path / "log", start_seconds=60)
    run(engine.start())
    yield engine
    run(engine.close())


def request(name, *, max_tokens=8):
    return GenerateRequest(prompt_ids=PROMPT, sampling=SamplingParams(max_tokens=max_tokens, seed=1, returns_routes=True), request_id=name)


def test_no_call_is_open_when_the_actors_are_killed(run, collectors):
    """Of one that is, Ray would tell the user at the end of a run."""
    others = RayCollectors(INTAKE, secret=SECRET, num_actors=2, start_seconds=60, max_restarts=3)

    async def scenario():
        await others.start()
        listeners = list(others._listeners)
        await asyncio.sleep(0.1)  # they have asked for answers
        await others.close()
        return [listener.cancelled() for listener in listeners]

    assert run(scenario()) == [False, False]


def assert_whole(payload, num_tokens):
    assert payload.token_ids.tolist() == [token_at(position) for position in range(num_tokens)]
    assert payload.logprobs.tolist() == [-0.25 * (token_at(position) % 4) for position in range(num_tokens)]
    assert payload.prompt_ids.tolist() == list(PROMPT)
    assert payload.routes.shape == (len(PROMPT) + num_tokens - 1, LAYERS, TOP_K)
    assert [array.dtype for array in (payload.prompt_ids, payload.token_ids, payload.logprobs, payload.routes)] == [
        np.int32, np.int32, np.float32, np.uint8,
    ]  # fmt: skip
    assert payload.text == Letters().decode(payload.token_ids.tolist(), skip_special_tokens=True)


def test_a_completion_is_in_the_store_and_the_driver_has_its_numbers(run, collectors, engine):
    answer = run(collectors.ask(engine, request("r"), None))
    completion = answer.completion
    assert (completion.request_id, completion.num_prompt, completion.num_tokens, completion.finish_reason) == ("r", 3, 8, "length")
    assert completion.spans == (VersionSpan(version=1, num_tokens=8),)
    assert isinstance(completion.payload, InStore)
    payload = completion.payload.get()
    assert_whole(payload, 8)
    assert (completion.routes_bytes, completion.num_bytes) == (10 * LAYERS * TOP_K, payload.num_bytes)
    assert answer.text == payload.text
    assert answer.load == ServerLoad(cache_share=0.75, num_preempted=3)


def test_neither_tokens_nor_routes_nor_text_of_a_finished_sample_stay_in_the_driver(run, collectors, engine):
    num_samples, num_tokens = 16, 20_000
    pool = RolloutPool([engine], max_running=8, max_queued=0, collector=collectors, request_seconds=60)

    async def group(index):
        sampling = SamplingParams(max_tokens=num_tokens, seed=1, returns_routes=True)
        answers = await asyncio.gather(*(pool.generate(PROMPT, sampling, f"{index}-{i}") for i in range(num_samples)))
        samples = tuple(Sample(completion=answer.completion, score=Score(reward=float(len(answer.text)))) for answer in answers)
        return Group(prompt=Prompt(index=index, token_ids=PROMPT, text="", data_source="", ground_truth=""), samples=samples)

    async def scenario():
        pool.fleet.served(pool.fleet.members)
        await group(0)  # what the first use leaves behind is not a sample's
        tracemalloc.start()
        kept = await group(1)
        await asyncio.sleep(0.1)  # the turn of the event loop that brought them ends
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return kept, held

    kept, held = run(scenario())
    assert min(sample.completion.num_bytes for sample in kept.samples) > num_tokens * (8 + LAYERS * TOP_K)
    assert held < num_samples * 2_500
    assert len(ray.cloudpickle.dumps(kept)) < num_samples * 2_000


def test_requests_of_one_turn_are_one_message_and_their_payloads_one_object(run, collectors, engine):
    async def scenario():
        answers = await asyncio.gather(*(collectors.ask(engine, request(f"r{index}"), None) for index in range(20)))
        return answers, json.loads(await engine.call("GET", "/sizes"))

    answers, sizes = run(scenario())
    assert sizes == [20]
    assert [answer.completion.request_id for answer in answers] == [f"r{index}" for index in range(20)]
    payloads = [answer.completion.payload for answer in answers]
    assert len({payload.reference for payload in payloads}) < 20
    for payload, fetched in zip(payloads, fetch(payloads), strict=True):
        assert_whole(fetched, 8)
        assert_whole(payload.get(), 8)


def test_a_server_has_a_collector_on_its_node_and_those_of_a_node_share_its_servers(run):
    here = ray.get_runtime_context().get_node_id()
    other = RayCollectors(INTAKE, secret=SECRET, num_actors=2, start_seconds=60, nodes=[here])
    run(other.start())
    try:
        engines = [HTTPEngine([NodeOfServer(node_id=here)], secret=SECRET, port=0, log_path=Path(), start_seconds=1) for _ in range(4)]
        assert [[home.actor for home in other._new_homes(engine)] for engine in engines] == [[actor] for actor in other._actors * 2]
        elsewhere = HTTPEngine([NodeOfServer(node_id="gone")], secret=SECRET, port=0, log_path=Path(), start_seconds=1)
        assert other._new_homes(elsewhere)[0].actor in other._actors
    finally:
        run(other.close())


def test_collectors_share_the_prompts_of_a_server_and_not_the_requests_of_a_prompt(run, engine):
    other = RayCollectors(INTAKE, secret=SECRET, num_actors=2, start_seconds=60, per_server=2)
    prompts = [(*PROMPT,) for _ in range(6)]
    requests = [replace(request(f"r{group}-{index}"), prompt_ids=prompt) for group, prompt in enumerate(prompts) for index in range(4)]

    async def scenario():
        await other.start()
        answers = await asyncio.gather(*(other.ask(engine, each, None) for each in requests))
        sizes = json.loads(await engine.call("GET", "/sizes"))
        await other.close()
        return [answer.completion.request_id for answer in answers], sizes

    names, sizes = run(scenario())
    assert names == [each.request_id for each in requests]
    assert sizes == [12, 12]


def test_of_several_that_were_asked_together_one_can_be_dropped(run, collectors, engine):
    async def scenario():
        held = asyncio.create_task(collectors.ask(engine, request("held"), None))
        assert (await collectors.ask(engine, request("whole"), None)).completion.num_tokens == 8
        assert json.loads(await engine.call("GET", "/sizes")) == [2]
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        async with asyncio.timeout(5):
            while json.loads(await engine.call("GET", "/dropped")) != ["held"]:
                pass
        assert (await collectors.ask(engine, request("next"), None)).completion.num_tokens == 8

    run(scenario())


def test_a_collector_that_is_made_again_is_asked_again_what_has_no_answer(run, engine, collectors):
    other = RayCollectors(INTAKE, secret=SECRET, num_actors=1, start_seconds=60, max_restarts=1)

    async def scenario():
        await other.start()
        held = asyncio.create_task(other.ask(engine, request("held"), None))
        async with asyncio.timeout(60):
            while json.loads(await engine.call("GET", "/sizes")) != [1]:
                pass
            os.kill(other._homes[0].process.pid, signal.SIGKILL)
            while len(json.loads(await engine.call("GET", "/sizes"))) < 2:
                pass
            await engine.call("POST", "/abort", b'{"request_ids": ["held"]}')
            answer = await held
        assert_whole(await asyncio.to_thread(answer.completion.payload.get), 8)
        assert (await other.ask(engine, request("next"), None)).completion.num_tokens == 8
        await other.close()

    run(scenario())


def test_what_a_push_left_is_joined_with_the_rest(run, collectors, engine):
    pool = RolloutPool([engine], max_running=8, max_queued=0, collector=collectors, request_seconds=60)

    async def scenario():
        pool.fleet.served(pool.fleet.members)
        return await pool.generate(PROMPT, request("part-5").sampling, "part-5")

    answer = run(scenario())
    assert_whole(answer.completion.payload.get(), 8)
    assert answer.completion.spans == (VersionSpan(version=1, num_tokens=5), VersionSpan(version=2, num_tokens=3))
    assert (answer.completion.finish_reason, pool.num_resumed) == ("length", 1)


def test_a_request_past_its_deadline_is_dropped_by_the_server(run, collectors, engine):
    pool = RolloutPool([engine], max_running=8, max_queued=0, collector=collectors, request_seconds=1)

    async def scenario():
        pool.fleet.served(pool.fleet.members)
        with pytest.raises(EngineError, match="held took longer than deadlines.completion_seconds = 1"):
            await pool.generate(PROMPT, request("held").sampling, "held")
        async with asyncio.timeout(5):
            while json.loads(await engine.call("GET", "/dropped")) != ["held"]:
                pass

    run(scenario())


def test_a_collector_that_is_stopped_is_named_and_not_its_server(run, engine, collectors, tmp_path):
    other = RayCollectors(INTAKE, secret=SECRET, num_actors=1, start_seconds=60)
    pool = RolloutPool([engine], max_running=8, max_queued=0, collector=other, request_seconds=1, hangs=HangReports(tmp_path))

    async def scenario():
        await other.start()
        pool.fleet.served(pool.fleet.members)
        (stopped,) = other.watched
        os.kill(stopped.process.pid, signal.SIGSTOP)
        with pytest.raises(HangError, match=r"^rollout: collector 0 did not arrive .*completion_seconds\)\n.* its process is stopped"):
            await pool.generate(PROMPT, request("whole").sampling, "whole")
        os.kill(stopped.process.pid, signal.SIGCONT)
        await other.close()

    run(scenario())


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("refuse", EngineError, "refuse: is refused"),
        ("garbage", EngineUnsound, "garbage: the answer cannot be this request's: token 1000: must be in the model's vocabulary"),
        ("die", EngineUnavailable, "the server ended with exit code 3"),
    ],
)
def test_a_failure_names_server_and_cause_as_without_collectors(run, collectors, engine, name, kind, said):
    with pytest.raises(kind, match=rf"{engine.name}: .*{said}") as caught:
        run(collectors.ask(engine, request(name), None))
    assert type(caught.value) is kind


def test_collectors_that_do_not_start_in_time_are_told_and_ended(run, collectors):
    other = RayCollectors(INTAKE, secret=SECRET, num_actors=2, start_seconds=0.001)
    with pytest.raises(StoreError, match=r"start_seconds = 0.001: not all of rollout.num_collectors = 2 .* have started") as late:
        run(other.start())
    assert late.value.exit_code == ExitCode.KILLED
    run(other.close())


def test_the_loss_of_a_collector_says_what_is_lost_and_what_to_do(run, engine, collectors):
    other = RayCollectors(INTAKE, secret=SECRET, num_actors=1, start_seconds=60)

    async def scenario():
        await other.start()
        answer = await other.ask(engine, request("whole"), None)
        held = asyncio.create_task(other.ask(engine, request("held"), None))
        await asyncio.sleep(0)
        os.kill(other._homes[0].process.pid, signal.SIGKILL)
        with pytest.raises(StoreError, match="(?s)a process that receives completions ended.*the same command resumes") as in_flight:
            await held
        with pytest.raises(StoreError, match="samples were lost with the process that had received them") as received:
            async with asyncio.timeout(30):  # Ray takes a moment to hear of the death
                while await asyncio.to_thread(answer.completion.payload.get):
                    pass
        assert in_flight.value.exit_code == received.value.exit_code == ExitCode.KILLED
        assert received.value.origin.who == in_flight.value.origin.who == "a process that receives completions"
        assert received.value.origin.node == ray.util.get_node_ip_address()
        await other.close()

    run(scenario())


def test_samples_of_a_node_that_stands_still_are_not_waited_for_without_end(collectors):
    """As those that a run shows of its last step, when it ends since that node does not answer."""
    silent = ray.remote(num_cpus=0)(lambda: time.sleep(60)).remote()
    with pytest.raises(StoreError, match="did not come within 0.5 s: the node that has them stands still"):
        fetch([InStore(silent)], seconds=0.5)
    ray.cancel(silent, force=True)
