"""Whoever reaches a server's port without the run's secret: learns nothing, changes nothing, and is in nobody's way."""

import asyncio
import json
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_contract import ask
from tiny_servers import new_fake

from moerl.cluster.run_secret import RunSecret
from moerl.rollout.server import secret_gate, wire
from moerl.rollout.server.client import generate_at, new_session
from moerl.rollout.server.server_main import _ChildServer, listen
from moerl.rollout.server.wire import GenerateRequest
from moerl.types.completion import SamplingParams
from moerl.types.errors import EngineError

REQUESTS = [("POST", "/generate"), *((verb.http, verb.path) for verb in wire.VERBS.values()), ("GET", "/"), ("HEAD", "/health")]
AUTHORIZATIONS = ["", "Authorization: Bearer \r\n", f"Authorization: Bearer {RunSecret.new().key}\r\n", "Authorization: \xff\r\n"]
SECONDS = 60


def port_of(engine):
    return int(engine.name.rpartition(":")[2])


def sent(port, text):
    """All that comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(text.encode("latin-1"))
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return answer.decode()


def request(method, path, authorization, *, length, body=""):
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{authorization}Content-Length: {length}\r\n\r\n{body}"


@pytest.mark.parametrize("served", ["dense"], indirect=True)
def test_a_stranger_is_refused_every_verb_before_the_body_and_changes_nothing(run, served):
    """A body of a gigabyte is announced and never sent: the server waits for none of it."""
    bodies = {"/abort": '{"request_ids": null}', "/pause": '{"mode": "abort"}', "/sleep": '{"parts": ["weights"]}'}

    async def scenario():
        before = await ask(served, "before"), await served.engine.health()
        answers = [
            await asyncio.to_thread(sent, port_of(served.engine), request(method, path, authorization, length=length, body=body))
            for method, path in REQUESTS
            for authorization in AUTHORIZATIONS
            for body, length in ((bodies.get(path, "{}"), len(bodies.get(path, "{}"))), ("", 10**9))
        ]
        return before, (await ask(served, "after"), await served.engine.health()), answers

    before, after, answers = run(scenario())
    assert all(re.match("HTTP/1.1 401 .*\r\nconnection: close\r\n", answer, re.DOTALL) for answer in answers)
    assert len(answers) == 8 * len(REQUESTS)
    assert (replace(before[0], request_id="after"), before[1]) == after


@pytest.mark.parametrize("served", ["dense"], indirect=True)
def test_strangers_who_say_nothing_or_half_a_request_hold_up_nobody(run, served):
    async def scenario():
        address = ("127.0.0.1", port_of(served.engine))
        strangers = [socket.create_connection(address, SECONDS) for _ in range(100)]
        for stranger in strangers[::2]:
            stranger.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nAuthoriz")
        try:
            async with asyncio.timeout(secret_gate.REQUEST_SECONDS / 2):  # before any of them was closed
                return await served.engine.health(), (await ask(served, "a")).finish_reason
        finally:
            for stranger in strangers:
                stranger.close()

    health, reason = run(scenario())
    assert (health.status, health.version, reason) == ("healthy", 1, "length")


class Ready(asyncio.Event):
    """In the place of stdout."""

    def write(self, line):
        self.set()

    def close(self): ...


@pytest.fixture
def beside_server(run, checkpoints):
    """beside_server(use) is use(secret, port) beside a rollout server in this process, which speaks TLS if it gets a context."""

    async def serving(use, tls):
        state, secret, ready = new_fake(checkpoints["dense"]), RunSecret.new(), Ready()
        await state.start()
        server = _ChildServer(state, state._limits, secret, ready, tls)
        served = asyncio.create_task(server._serve([listener := listen("127.0.0.1", 0)]))
        await ready.wait()
        try:
            return await use(secret, listener.getsockname()[1])
        finally:
            server.should_exit = True
            await served

    return lambda use, tls=None: run(serving(use, tls))


async def connect(port, text=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    return reader, writer


async def is_closed(reader):
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


def test_a_connection_without_a_request_is_closed_and_one_of_the_run_is_kept(beside_server, monkeypatch):
    monkeypatch.setattr(secret_gate, "REQUEST_SECONDS", 0.2)

    async def use(secret, port):
        head = f"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: {secret.headers['Authorization']}\r\n\r\n".encode()
        ours, writer = await connect(port, head)
        assert (await ours.readline()).startswith(b"HTTP/1.1 200")
        others = [await connect(port), await connect(port, b"GET /"), await connect(port, b"POST /generate HTTP/1.1\r\nHost: x\r\n")]
        async with asyncio.timeout(SECONDS):
            assert all([await is_closed(reader) for reader, _ in others])
        writer.write(head)
        await ours.readuntil(b"HTTP/1.1 200")
        for _, each in (*others, (ours, writer)):
            each.close()

    beside_server(use)


def test_a_body_that_is_no_http_is_refused_without_a_traceback(beside_server, caplog):
    async def use(secret, port):
        text = b"POST /abort HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n"
        reader, writer = await connect(port, text)
        async with asyncio.timeout(SECONDS):
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()

    beside_server(use)
    assert {record.levelname for record in caplog.records if record.name == "uvicorn.error"} == {"WARNING"}


def test_a_client_of_the_run_that_ends_within_its_body_leaves_no_traceback(beside_server, caplog):
    """As a collector that is killed does."""

    async def use(secret, port):
        head = f"POST /abort HTTP/1.1\r\nHost: x\r\nAuthorization: {secret.headers['Authorization']}\r\n".encode()
        _, gone = await connect(port, head + b"Content-Length: 100\r\n\r\nabc")
        reader, writer = await connect(port, head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n")
        gone.close()
        async with asyncio.timeout(SECONDS):
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()

    beside_server(use)
    assert {record.levelname for record in caplog.records if record.name == "uvicorn.error"} == {"WARNING"}


def test_where_strangers_take_half_of_the_files_the_oldest_gives_way(beside_server, monkeypatch):
    monkeypatch.setattr(secret_gate, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(secret_gate.resource, "getrlimit", lambda _: (8, 8))

    async def use(secret, port):
        strangers = []
        for _ in range(7):
            strangers.append(await connect(port))
            await asyncio.sleep(0.01)  # so that the server accepts them in this order
        async with asyncio.timeout(SECONDS):
            assert all([await is_closed(reader) for reader, _ in strangers[:3]])
        assert not any(reader.at_eof() for reader, _ in strangers[3:])
        for _, each in strangers:
            each.close()

    beside_server(use)


@pytest.mark.parametrize("served", ["dense"], indirect=True)
def test_a_driver_that_meets_another_runs_server_says_so(run, served):
    engine = served.engine

    async def scenario():
        async with new_session(RunSecret.new()) as session:
            request = GenerateRequest(request_id="r", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=2, seed=1))
            said = rf"^{engine.name}: r: .* does not know this run's secret; is it another run's server.* rollout.port=0"
            with pytest.raises(EngineError, match=said):
                await anext(generate_at(session, engine.url, engine.name, [request]))

    run(scenario())


@pytest.mark.parametrize("served", ["dense"], indirect=True)
def test_the_secret_is_seen_neither_in_the_servers_arguments_nor_its_environment_nor_its_log(served):
    key, process = served.engine._secret.key, served.engine._process
    shown = Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
    assert len(key) >= 32 and key.encode() not in shown
    assert key not in process._log_path.read_text()
    assert key not in repr(vars(served.engine)) and key not in repr(vars(process))


@pytest.mark.parametrize("stdin", ["too-short\n", "x" * 2000])
def test_a_server_by_hand_without_a_secret_says_what_stdin_must_be(stdin):
    code = "from moerl.rollout.server.server_main import private_stdout, running\nwith running(private_stdout()): print('served')"
    ended = subprocess.run([sys.executable, "-c", code], input=stdin, capture_output=True, text=True)
    assert ended.returncode == 1 and "served" not in ended.stderr
    assert "stdin: must begin with a line of at least 32 letters and digits" in json.loads(ended.stdout)["error"]
