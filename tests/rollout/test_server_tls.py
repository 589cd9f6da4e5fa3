"""Servers that speak TLS: who gets an answer, who gets none, and that strangers are in nobody's way before TLS is agreed either."""

import asyncio
import pickle
import socket
import ssl
from dataclasses import replace

import pytest
from canned_server import Letters
from test_build_engines import config
from test_server_strangers import SECONDS, beside_server, connect, is_closed  # noqa: F401
from tiny_servers import VOCAB, push

from moerl.cluster.run_secret import RunSecret
from moerl.cluster.sockets import client_context, server_context
from moerl.config.schema.rollout_config import TLSConfig
from moerl.rollout.build_engines import build_engines
from moerl.rollout.fleet.collector import Intake
from moerl.rollout.fleet.collector_actor import CollectorActor
from moerl.rollout.server import secret_gate
from moerl.rollout.server.client import BrokenConnection, generate_at, new_session
from moerl.rollout.server.messages import dump_requests
from moerl.rollout.server.wire import GenerateRequest
from moerl.types.completion import SamplingParams
from moerl.types.errors import EngineError

SAMPLING = SamplingParams(max_tokens=6, seed=1)
FILES = {"certificate": "server.pem", "key": "server.key", "authority": "authority.pem"}


def request():
    return GenerateRequest(request_id="r", prompt_ids=(4, 9), sampling=SAMPLING)


@pytest.fixture(scope="module")
def tls(certificates):
    return TLSConfig(**{name: str(certificates / file) for name, file in FILES.items()})


@pytest.mark.usefixtures("forked")
def test_a_server_over_tls_answers_those_that_trust_its_authority_and_have_the_secret(run, checkpoints, tmp_path, tls):
    """Everything of one hf server: its start is what costs."""
    checkpoint, secret = checkpoints["moe"], RunSecret.new()
    (server,) = build_engines(config(tls=tls, max_running=4, prefill_chunk=16), checkpoint.directory, tmp_path, secret)
    trusting = client_context(server.authority)

    async def asked(url, secret, context):
        async with new_session(secret, context) as session:
            _, outcome = await anext(generate_at(session, url, server.name, [request()]))
            return outcome

    async def refused(error, said, url, secret, context):
        with pytest.raises(error, match=said):
            await asked(url, secret, context)

    async def collected():
        collector = CollectorActor(secret, server.authority)
        collector._intake = Intake(vocab_size=VOCAB, decoder=Letters(), routes=None)
        await collector.submit([], pickle.dumps((server.url, server.name, [7], dump_requests([request()]))), {})
        await collector._arrived.wait()
        await collector._connected().close()
        return collector._ready[7][1]

    async def scenario():
        await server.start()
        try:
            await push(server, checkpoint.tensors, 5)
            await refused(EngineError, r"not trusted .* rollout.tls.authority, .* have 127.0.0.1 in its", server.url, secret, None)
            by_name = server.url.replace("127.0.0.1", "localhost")
            await refused(EngineError, r"not trusted .*localhost.* have localhost in its", by_name, secret, trusting)
            await refused(EngineError, "does not know this run's secret", server.url, RunSecret.new(), trusting)
            await refused(BrokenConnection, "/generate failed", server.url.replace("https", "http"), secret, None)
            return await server.generate((4, 9), SAMPLING, "r"), await asked(server.url, secret, trusting), await collected()
        finally:
            await server.close()

    ours, again, payload = run(scenario())
    assert server.url.startswith("https://127.0.0.1:") and {span.version for span in ours.spans} == {5}
    assert ours == again and payload.token_ids.tolist() == list(ours.token_ids)
    assert tls.key in server._process._command


@pytest.mark.usefixtures("forked")
def test_files_that_a_node_lacks_end_the_start_of_its_server_with_their_names(run, checkpoints, tmp_path, tls):
    lacking = replace(tls, key=str(tmp_path / "absent.key"))
    (server,) = build_engines(config(tls=lacking), checkpoints["moe"].directory, tmp_path, RunSecret.new())
    with pytest.raises(EngineError, match=r"^rollout.tls.certificate = .*absent.key'?: cannot be used on this node"):
        run(server.start())


def head(secret):
    return f"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: {secret.headers['Authorization']}\r\n\r\n".encode()


async def secured(port, context, text=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(text)
    return reader, writer


@pytest.fixture
def contexts(certificates):
    """(server's, client's)"""
    return server_context(certificates / "server.pem", certificates / "server.key"), client_context(certificates / "authority.pem")


def test_a_connection_is_closed_without_a_handshake_or_a_request_and_one_of_the_run_is_kept(beside_server, contexts, monkeypatch):  # noqa: F811
    monkeypatch.setattr(secret_gate, "REQUEST_SECONDS", 0.5)
    theirs, trusting = contexts

    async def use(secret, port):
        ours, writer = await secured(port, trusting, head(secret))
        assert (await ours.readline()).startswith(b"HTTP/1.1 200")
        others = [await connect(port), await connect(port, b"\x16\x03\x01\x02\x00\x01"), await connect(port, head(secret))]
        others += [await secured(port, trusting), await secured(port, trusting, b"POST /generate HTTP/1.1\r\n")]
        async with asyncio.timeout(SECONDS):
            assert all([await is_closed(reader) for reader, _ in others])
        writer.write(head(secret))
        await ours.readuntil(b"HTTP/1.1 200")
        for _, each in (*others, (ours, writer)):
            each.close()

    beside_server(use, theirs)


def test_where_strangers_without_a_handshake_take_half_of_the_files_the_oldest_gives_way(beside_server, contexts, monkeypatch):  # noqa: F811
    monkeypatch.setattr(secret_gate, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(secret_gate.resource, "getrlimit", lambda _: (8, 8))
    theirs, trusting = contexts

    async def use(secret, port):
        strangers = []
        for _ in range(7):
            strangers.append(await connect(port))
            await asyncio.sleep(0.01)  # so that the server accepts them in this order
        async with asyncio.timeout(SECONDS):
            assert all([await is_closed(reader) for reader, _ in strangers[:3]])
            assert not any(reader.at_eof() for reader, _ in strangers[3:])
            ours, writer = await secured(port, trusting, head(secret))
            await ours.readuntil(b"HTTP/1.1 200")
        for _, each in (*strangers, (ours, writer)):
            each.close()

    beside_server(use, theirs)


def test_a_request_in_the_last_packet_of_the_handshake_is_answered(beside_server, contexts):  # noqa: F811
    theirs, trusting = contexts

    def answer(secret, port):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        side = trusting.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
            while True:
                try:
                    side.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    connection.sendall(outgoing.read())
                    incoming.write(connection.recv(65536))
            side.write(head(secret))
            connection.sendall(outgoing.read())  # the end of the handshake too
            while True:
                try:
                    return side.read(12)
                except ssl.SSLWantReadError:
                    incoming.write(connection.recv(65536))

    async def use(secret, port):
        return await asyncio.to_thread(answer, secret, port)

    assert beside_server(use, theirs) == b"HTTP/1.1 200"
