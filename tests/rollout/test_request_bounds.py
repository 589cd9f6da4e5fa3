"""Requests that no run sends: each is refused with a reason, and the server that got it serves as before."""

import asyncio
import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_values import altered, altered_once, number, odd
from test_routes import Batch
from tiny_servers import MAX_CONTEXT, VOCAB, new_fake, push

from moerl.rollout.engines.hf.scheduler import Scheduler, SlotRequest, SlotTable
from moerl.rollout.server import wire
from moerl.rollout.server.app import build_app
from moerl.rollout.server.limits import Limits
from moerl.rollout.server.messages import MAX_REQUESTS, MORE_BYTES, Frames, dump_requests, messages_of, parse_requests
from moerl.types.completion import SamplingParams

REFUSALS = (400, 409, 503)


class Server:
    """The app of a server, asked without HTTP."""

    def __init__(self, run, state):
        self.state, self._run, self._app = state, run, build_app(state, state._limits)

    def ask(self, path, body=b"", *, method="POST", chunk=2**16, headers=()):
        """Status, answer, and how much of the body was read."""
        return self._run(self._ask(path, body, method, chunk, headers))

    async def _ask(self, path, body, method, chunk, headers):
        chunks = [body[start : start + chunk] for start in range(0, len(body), chunk)] or [b""]
        sent, read = [], 0

        async def receive():
            nonlocal read
            if read == len(chunks):
                await asyncio.Event().wait()  # nobody leaves
            read += 1
            return {"type": "http.request", "body": chunks[read - 1], "more_body": read < len(chunks)}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": list(headers), "query_string": b""}
        await self._app(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]), sum(map(len, chunks[:read]))


@pytest.fixture(scope="module")
def server(run, checkpoints):
    state = new_fake(checkpoints["dense"])
    run(state.start())
    run(push(state, checkpoints["dense"].tensors, 1))
    yield Server(run, state)
    run(state.close())


def assert_serves(server):
    status, answer, _ = server.ask("/health", method="GET")
    assert (status, json.loads(answer)["status"], json.loads(answer)["version"]) == (200, "healthy", 1)
    status, answer = asked(server, generate())
    assert (status, len(wire.parse_completion(answer).token_ids)) == (200, 3)


def asked(server, body):
    """Status and content of the answer to a message of one request."""
    status, answer, _ = server.ask("/generate", body)
    if status != 200:
        return status, answer
    ((place, status, content),) = Frames([2**30]).feed(answer)
    assert place == 0
    return status, content


def generate(prompt_ids=(1, 2), request_id="r", **sampling):
    request = {"request_id": request_id, "prompt": 0, "sampling": {"max_tokens": 3, "seed": 1} | sampling}
    return json.dumps({"prompts": [prompt_ids], "requests": [request]}).encode()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (generate(top_k=2**70), r"top_k = 1180591620717411303424: must be in [0, 2^31)"),
        (generate(top_k=2**31), "top_k = 2147483648: must be in"),
        (generate(max_tokens=2**70), "must be at most model.max_context"),
        (generate(max_tokens=-(2**70)), "must be at least 1"),
        (generate(seed=2**200), "seed = "),
        (generate(num_drawn=2**70), "num_drawn = "),
        (generate(temperature=float("inf")), "temperature = inf: must be a number"),
        (generate(temperature=float("nan")), "temperature = nan: must be a number"),
        (generate(top_p=float("nan")), "top_p = nan"),
        (generate(stop_token_ids=[1] * 1025), "1025 stop tokens: must be at most 1024"),
        (generate(prompt_ids=[2**70]), f"token {2**70} is outside"),
        (generate(prompt_ids=[7] * MAX_CONTEXT), "must be at most model.max_context"),
        (generate(request_id="r" * 257), "at most 256 characters"),
        (b'{"requests": ' + b"[" * 50_000, "recursion limit"),
        (b'{"prompts": [[' + b"9" * 5000 + b"]]}", "number out of range"),
        (generate().replace(b'"prompt": 0', b'"prompt": 1'), "prompt = 1: must be below 1, the prompts of the message"),
        (b'{"prompts": [], "requests": []}', "at least 1 item"),
        (b"\xff", "Invalid JSON"),
    ],
)
def test_numbers_and_sizes_that_no_run_asks_for_are_refused_with_the_rule(server, body, said):
    status, answer = asked(server, body)
    assert status == 400 and said in json.loads(answer)["error"]
    assert_serves(server)


def test_a_request_that_is_refused_leaves_those_that_came_with_it_alone(server):
    sound, wrong = (json.loads(generate(request_id=name, **more)) for name, more in (("r", {}), ("w", {"top_k": 2**70})))
    body = json.dumps({"prompts": sound["prompts"], "requests": wrong["requests"] + sound["requests"]}).encode()
    _, answer, _ = server.ask("/generate", body)
    outcomes = {place: (status, content) for place, status, content in Frames([2**20] * 2).feed(answer)}
    assert outcomes[0][0] == 400 and "w: top_k = " in json.loads(outcomes[0][1])["error"]
    assert outcomes[1][0] == 200 and len(wire.parse_completion(outcomes[1][1]).token_ids) == 3


ADDRESSES = ("nowhere", "", "h:", ":1", "h:0", "h:65536", "h:1e3", "h:²")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seconds": 1e300}, "seconds = 1e+300: must be above 0 and at most 86400, a day"),
        ({"seconds": float("nan")}, "seconds = nan"),
        ({"seconds": float("inf")}, "seconds = inf"),
        ({"seconds": -1.0}, "seconds = -1.0"),
        *(({"address": address}, f"address = {address!r}: must be host:port") for address in ADDRESSES),
    ],
)  # fmt: skip
def test_a_push_that_could_wait_for_ever_or_for_nobody_is_refused(server, change, said):
    offer = dict(transport="ipc", address="127.0.0.1:1", server="s", senders=[0], num_readers=1, reader=0, buckets=[], seconds=1.0)
    offer["secret"] = "0" * 64
    status, answer, _ = server.ask("/weights/connect", json.dumps({"offer": offer | change}).encode())
    assert status == 400 and said in json.loads(answer)["error"]
    assert_serves(server)


@pytest.mark.parametrize("version", [-1, 2**31, 2**70])
def test_a_version_that_no_engine_could_count_is_refused(server, version):
    manifest = {"version": version, "tensors": [], "pieces": {}}
    status, answer, _ = server.ask("/weights/begin", json.dumps({"manifest": manifest}).encode())
    assert status == 400 and f"version = {version}: must be in [0, 2^31)" in json.loads(answer)["error"]
    assert_serves(server)


@pytest.mark.parametrize("path", ["/generate", "/abort"])
def test_a_body_beyond_the_bound_is_not_read_to_its_end(server, path):
    bound = server.state._limits.body_bytes + (MORE_BYTES if path == "/generate" else 0)
    status, answer, read = server.ask(path, b" " * 100, headers=[(b"content-length", b"%d" % (bound + 1))])
    assert (status, read) == (413, 0) and f"must be at most {bound}" in json.loads(answer)["error"]
    status, answer, read = server.ask(path, b" " * (bound + 2**20))  # in chunks, of a length that nobody has said
    assert status == 413 and read < bound + 2**17
    assert_serves(server)


def test_the_longest_request_of_a_run_fits_the_bound():
    limits = Limits(max_context=100_000, vocab_size=2**31)
    sampling = SamplingParams(max_tokens=1, seed=2**128 - 1, stop_token_ids=(2**31 - 1,) * 1024)
    longest = wire.GenerateRequest(request_id="\U0001f600" * 256, prompt_ids=(2**31 - 1,) * 99_999, sampling=sampling)
    assert limits.violation(longest.prompt_ids, sampling) == ""
    assert len(dump_requests([longest])) < limits.body_bytes
    (full,) = messages_of([longest] * MAX_REQUESTS)
    assert len(dump_requests(full)) < limits.body_bytes + MORE_BYTES
    several = [replace(longest, prompt_ids=(2**31 - 1,) * 99_999) for _ in range(7)]
    assert [len(message) for message in messages_of(several)] == [5, 2]
    assert all(len(dump_requests(message)) < limits.body_bytes + MORE_BYTES for message in messages_of(several))


SOUND = {
    "prompts": [[1, 2, 3]],
    "requests": [{
        "request_id": "r", "prompt": 0,
        "sampling": {
            "max_tokens": 3, "seed": 5, "temperature": 1.0, "top_p": 0.9, "top_k": 3, "stop_token_ids": [7], "num_drawn": 1,
            "returns_routes": True,
        },
    }],
}  # fmt: skip
ENTRY = {"name": "x", "start": [0], "shape": [2], "offset": 0, "num_bytes": 8}
OFFER = {
    "transport": "ipc", "address": "nobody:x", "server": "s", "senders": [0], "num_readers": 1, "reader": 0, "seconds": 1.0,
    "buckets": [{"sender": 0, "index": 0, "num_bytes": 8, "readers": [0], "entries": [ENTRY]}],
}  # fmt: skip
"""With an address at which nobody could be asked."""
MANIFEST = {
    "version": 2, "tensors": [{"name": "x", "shape": [2], "dtype": "float32"}],
    "pieces": {"x": [{"start": [0], "shape": [2], "ranks": [0], "digest": "0" * 32}]},
}  # fmt: skip
OTHERS = {
    "connect": {"offer": OFFER}, "begin": {"manifest": MANIFEST}, "finish": {"version": 2}, "pause": {"mode": "x"},
    "sleep": {"parts": ["x"]},
}  # fmt: skip
CASES = 10
"""Of every seed."""


@settings(max_examples=250)
@given(st.integers(0, 2**64))
def test_any_request_for_a_completion_is_refused_or_the_engine_can_take_it(server, seed):
    random = Random(seed)
    for _ in range(CASES):
        leaf = random.choice((odd, number))
        body = json.dumps(altered_once(random, SOUND, leaf) if random.random() < 0.5 else altered(random, SOUND, leaf)).encode()
        if random.random() < 0.1:
            at = random.randrange(len(body))
            body = body[:at] + random.randbytes(random.randrange(3)) + body[at + random.randrange(3) :]
        status, answer, _ = server.ask("/generate", body)
        assert status == 200 or (status == 400 and json.loads(answer)["error"]), (body, answer)
        requests = parse_requests(body) if status == 200 else ()
        bounds = [wire.max_completion(len(request.prompt_ids), request.sampling) for request in requests]
        for place, status, content in Frames([max(bound, 2**20) for bound in bounds]).feed(answer if requests else b""):
            asked = requests[place]
            assert status == 200 or (status in (400, 409) and json.loads(content)["error"]), (body, content)
            if status == 200:
                assert len(wire.parse_completion(content).token_ids) <= asked.sampling.max_tokens
                assert len(content) <= bounds[place]
                SlotTable(1, MAX_CONTEXT, VOCAB).take(0, len(asked.prompt_ids), asked.sampling)


@settings(max_examples=50)
@given(st.integers(0, 2**64))
def test_any_body_of_any_other_verb_is_heeded_or_refused_and_never_a_bug(server, seed):
    random = Random(seed)
    for _ in range(CASES):
        verb = wire.VERBS[random.choice(sorted(OTHERS))]
        body = json.dumps(altered(random, OTHERS[verb.name])).encode()
        status, answer, _ = server.ask(verb.path, body)
        assert status in (200, *REFUSALS), (verb.name, body, answer)


def test_a_server_that_was_asked_all_this_serves_after_the_next_push(run, server, checkpoints):
    run(server.state.wake())
    run(server.state.resume())
    run(push(server.state, checkpoints["dense"].tensors, 1))
    assert_serves(server)


def test_a_request_that_the_engine_cannot_take_ends_alone(checkpoints):
    """With numbers that no limit has foreseen, beside a sound one."""
    torch.set_num_threads(1)
    forward = Batch(checkpoints["dense"].directory, deterministic=False).forward
    scheduler, outcomes = Scheduler(forward, max_context=MAX_CONTEXT), {}
    sound = SamplingParams(max_tokens=4, seed=1)
    for name, sampling in {"sound": sound, "wrong": replace(sound, top_k=2**70), "next": sound}.items():
        done = lambda outcome, name=name: outcomes.__setitem__(name, outcome)  # noqa: E731
        scheduler.add([SlotRequest(key=name, prompt_ids=np.array((1, 2)), sampling=sampling, done=done)])
    while scheduler.has_work:
        scheduler.step(1)
    assert isinstance(outcomes["wrong"], OverflowError)
    assert len(outcomes["sound"].token_ids) == len(outcomes["next"].token_ids) == 4
    assert sorted(scheduler._free) == list(range(forward.cache.num_slots))
