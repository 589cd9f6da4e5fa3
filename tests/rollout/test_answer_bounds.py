"""Answers that no sound server gives: none is followed, inflated, kept whole or trained on, and only the server that gives one is ended."""

import asyncio
import gzip
import json
import math
import re
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_values import altered, altered_once, number, odd
from test_fleet import PROMPT, bring, serving, states, until
from test_fleet import SAMPLING as SAMPLING_OF_FLEET
from tiny_servers import VOCAB

from moerl.cluster.run_secret import RunSecret
from moerl.rollout.fleet.completion_check import check_completion, check_routes
from moerl.rollout.server import wire
from moerl.rollout.server.client import BrokenConnection, abort_at, generate_at, new_session
from moerl.rollout.server.messages import dump_frame
from moerl.rollout.server.wire import GenerateRequest
from moerl.types.completion import Completion, DraftCounts, SamplingParams, VersionSpan
from moerl.types.errors import EngineError, EngineUnsound
from moerl.types.routes import RouteShape

SHAPE = RouteShape(num_layers=2, top_k=2, num_experts=8)
SAMPLING = SamplingParams(max_tokens=4, seed=1, stop_token_ids=(7,), returns_routes=True)
SOUND = Completion(
    request_id="r",
    token_ids=(5, 6, 7),
    logprobs=(-1.0, -0.5, 0.0),
    spans=(VersionSpan(version=1, num_tokens=2), VersionSpan(version=2, num_tokens=1)),
    finish_reason="stop",
    routes=(np.arange(5 * 2 * 2, dtype=np.uint8) % 8).reshape(5, 2, 2),
)


def assert_sound(completion):
    """All that training takes for granted."""
    count = len(completion.token_ids)
    assert completion.request_id == "r" and count == len(completion.logprobs) <= SAMPLING.max_tokens
    assert all(type(token) is int and 0 <= token < VOCAB for token in completion.token_ids)
    assert all(math.isfinite(logprob) and logprob < 0.01 for logprob in completion.logprobs)
    assert sum(span.num_tokens for span in completion.spans) == count
    assert all(span.num_tokens > 0 and 0 <= span.version < 2**31 for span in completion.spans)
    assert completion.finish_reason in ("stop", "length", "abort")
    assert min(completion.drafts.checks, completion.drafts.accepted) >= 0
    if count and completion.finish_reason != "abort":
        assert completion.routes.shape == (3 + count - 1, 2, 2) and completion.routes.max() < 256


def checked(content):
    completion = wire.parse_completion(content)
    check_completion(completion, SAMPLING, request_id="r", vocab_size=VOCAB, server="s")
    if completion.token_ids and completion.finish_reason != "abort":
        check_routes(completion, num_prompt=3, shape=SHAPE)
    return completion


def damaged(random):
    """Bytes of an answer, with an odd head, or with odd bytes anywhere."""
    head, _, tail = wire.dump_completion(SOUND).partition(b"\n")
    sound, leaf = json.loads(head), random.choice((odd, number, number))
    head = json.dumps(altered_once(random, sound, leaf) if random.random() < 0.6 else altered(random, sound, leaf)).encode()
    content = bytearray(head + b"\n" + random.choice((tail, tail[:24])))  # with routes and without
    for _ in range(random.choice((0, 0, 0, 2))):
        at = random.randrange(len(content))
        content[at : at + random.randrange(3)] = random.randbytes(random.randrange(3))
    return bytes(content)


@pytest.mark.parametrize("drafts", [DraftCounts(-1, 0), DraftCounts(3, -1), DraftCounts(0, 2)])
def test_counts_of_drafts_that_cannot_be_are_refused(drafts):
    with pytest.raises(EngineUnsound, match=f"{drafts.accepted} drafts accepted in {drafts.checks} checks"):
        checked(wire.dump_completion(replace(SOUND, drafts=drafts)))
    assert checked(wire.dump_completion(replace(SOUND, drafts=DraftCounts(2, 1)))).drafts == DraftCounts(2, 1)


@settings(max_examples=200)
@given(st.integers(0, 2**64))
def test_any_bytes_are_a_sound_completion_or_refused(seed):
    random = Random(seed)
    for _ in range(10):
        content = damaged(random)
        try:
            completion = checked(content)
        except (ValueError, EngineUnsound):
            continue
        assert_sound(completion)


@pytest.mark.parametrize("shape", [(0, 2**63, 1), (2**70, 0, 0), (0, 2**31, 1)])
def test_routes_of_a_shape_that_no_array_has_are_refused(shape):
    head, _, tail = wire.dump_completion(SOUND).partition(b"\n")
    with pytest.raises(ValueError, match="routes_shape"):
        wire.parse_completion(json.dumps(json.loads(head) | {"routes_shape": shape}).encode() + b"\n" + tail[:24])


def test_a_sound_answer_is_taken():
    assert_sound(checked(wire.dump_completion(SOUND)))


@asynccontextmanager
async def answering(head, chunks=()):
    """A server that answers whatever it is asked; where it listens, and what it was asked."""
    asked = []

    async def answer(reader, writer):
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 " + head + b"\r\n\r\n")
        try:
            for chunk in chunks:
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            asked.append(b"gone")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


async def ask(url, **sampling):
    request = GenerateRequest(request_id="r", prompt_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=4, seed=1, **sampling))
    async with new_session(RunSecret.new()) as session:
        return [outcome async for _, outcome in generate_at(session, url, "s", [request])]


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"])
def test_a_redirect_is_not_followed_with_prompt_and_secret(run, status):
    async def scenario():
        async with answering(b"200 OK") as (elsewhere, asked):
            head = f"{status}\r\nLocation: {elsewhere}/generate\r\nContent-Length: 0"
            async with answering(head.encode()) as (url, _):
                with pytest.raises(EngineUnsound, match=f"s: r: answered .*status {status[:3]}"):
                    await ask(url)
            assert asked == []

    run(scenario())


FRAME = dump_frame(0, 200, wire.dump_completion(replace(SOUND, routes=None)))


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (b"", "an answer to request 2021161080, which waits for none"),
        (FRAME, "an answer to request 2021161080, which waits for none"),
        (FRAME[:6] + (2**40).to_bytes(8, "little"), f"an answer of {2**40} bytes, more than the 1049632 that this request can have"),
    ],
    ids=["garbage", "after the answer", "of any length"],
)
def test_an_answer_that_never_ends_is_broken_off_at_what_its_request_can_yield(run, before, said):
    chunk = b"x" * 2**16
    assert wire.max_completion(3, SamplingParams(max_tokens=4, seed=1)) == 1049632

    async def scenario():
        chunks = chain([before], (chunk for _ in range(2**14)))  # a GiB
        async with answering(b"200 OK\r\nConnection: close", chunks) as (url, asked):
            with pytest.raises(EngineUnsound, match=f"(?s)s: r: answered .*{said}"):
                await ask(url)
            await until(lambda: asked[-1] == b"gone")

    run(scenario())


def test_an_answer_to_a_command_that_never_ends_is_broken_off_at_the_longest_error(run):
    async def scenario():
        async with answering(b"200 OK\r\nConnection: close", (b"x" * 2**16 for _ in range(2**14))) as (url, asked):  # a GiB
            async with new_session(RunSecret.new()) as session:
                with pytest.raises(EngineUnsound, match=f"s: answered with more than {2**20} bytes"):
                    await abort_at(session, url, "s", ["r"])
            await until(lambda: asked[-1] == b"gone")

    run(scenario())


def test_an_answer_that_ends_too_early_is_a_broken_connection_or_unsound(run):
    async def scenario(content, kind, said):
        async with answering(b"200 OK\r\nConnection: close", [content]) as (url, _):
            with pytest.raises(kind, match=said):
                await ask(url)

    run(scenario(b"", BrokenConnection, "s: /generate ended, the server still runs: 1 answers are missing"))
    run(scenario(FRAME[:-1], EngineUnsound, "(?s)s: r: answered .*ends within a frame"))


def test_compressed_bytes_are_taken_as_they_are(run):
    bomb = gzip.compress(bytes(2**24))

    async def scenario():
        head = f"200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}"
        async with answering(head.encode(), [bomb]) as (url, asked):
            with pytest.raises(EngineUnsound, match=r"s: r: answered b'\\x1f\\x8b"):
                await ask(url)
            assert b"Accept-Encoding: identity" in asked[0]

    run(scenario())


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_server_that_answers_falsely_is_ended_alone_and_the_others_go_on(run, checkpoints, monkeypatch, num_servers):
    """Started again and with weights it may serve; after more false answers than rollout.max_restarts it stays dead, with their cause."""

    async def scenario():
        async with serving(checkpoints, num_servers, max_restarts=1) as (pool, engines):
            first = pool.fleet.members[0]
            upstream = engines[0].generate

            async def false(*request):
                return replace(await upstream(*request), request_id="another's")

            for ended in range(2):
                monkeypatch.setattr(engines[0], "generate", false)
                answers = [asyncio.create_task(pool.generate(PROMPT, SAMPLING_OF_FLEET, f"r{ended}{i}")) for i in range(4)]
                if ended == 0:
                    await until(lambda: first.state == "stale")
                    monkeypatch.setattr(engines[0], "generate", upstream)
                    await bring(pool, checkpoints, 1)
                    assert {answer.completion.finish_reason for answer in await asyncio.gather(*answers)} == {"length"}
                    assert (first.num_starts, first.state) == (2, "healthy")
            said = r"fake-0: r1.: the answer cannot be this request's: request_id = \"another's\""
            if num_servers == 1:
                for answer in answers:
                    with pytest.raises(EngineError, match=rf"no rollout server is left \(rollout.max_restarts = 1\): {said}"):
                        await answer
            else:
                assert {answer.completion.finish_reason for answer in await asyncio.gather(*answers)} == {"length"}
                await until(lambda: states(pool) == ["dead", "healthy"])
                assert re.search(said, str(first.gone))
            assert [member.num_starts for member in pool.fleet.members] == [2, 1][:num_servers]

    run(scenario())


def test_a_server_whose_answer_to_a_command_is_garbage_is_ended_too(run, checkpoints, monkeypatch):
    async def scenario():
        async with serving(checkpoints, 2) as (pool, engines):

            async def garbage(mode):
                raise EngineUnsound("fake-0: answered b'<html>'")

            monkeypatch.setattr(engines[0], "pause", garbage)
            before = {member: member.num_starts for member in pool.fleet.members}
            with pytest.raises(EngineError, match=r"pause failed on 1 of 2 servers\n\* fake-0: answered b'<html>'"):
                await pool.pause("keep")
            assert await pool.fleet.lost(before)  # by which a push knows that it may begin anew with the others
            await until(lambda: states(pool) == ["stale", "healthy"])

    run(scenario())
