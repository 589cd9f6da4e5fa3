"""Strangers at the ports of a push: whoever reaches them without the secret reads nothing, changes nothing, and holds nobody up."""

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import psutil
import pytest
from session_process import MODEL, Engine, Source, first_push

from moerl.cluster.run_secret import RunSecret, StrangerError
from moerl.rollout.server.wire import OFFER, VERBS
from moerl.types.errors import WeightError
from moerl.weights.sync import WeightSync
from moerl.weights.transport.links import Lender
from moerl.weights.transport.rendezvous import Deadline, Rendezvous, explained
from moerl.weights.verify.digest import tensor_digest

HOST, SECONDS = "127.0.0.1", 60.0
DIGESTS = {name: tensor_digest(tensor) for name, tensor in MODEL.items()}
GARBAGE = b'{"token": "0", "reader": 0, "name": "me"}\n' + b"\xff" * 200
CROWD = """
import socket, struct, sys
garbage = bytes.fromhex(sys.argv[1])
crowd = []
for line in sys.stdin:
    for port in map(int, line.split()):
        for number in range(400):
            crowd.append(socket.create_connection(("127.0.0.1", port)))
            if number % 2:
                try:
                    crowd[-1].sendall(garbage)
                except OSError:
                    pass
        crowd[-2].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        crowd[-2].close()
    print(flush=True)
"""
"""To every port that it is told: 200 connections that say nothing and stay, and 200 that talk nonsense; one ends with a reset."""


@contextmanager
def crowd():
    """Lets strangers come to ports; returns when all of them are there."""
    command = [sys.executable, "-S", "-c", CROWD, GARBAGE.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def come(ports):
            print(*ports, file=process.stdin, flush=True)
            assert process.stdout.readline() == "\n"

        try:
            yield come
        finally:
            process.kill()


def listening():
    """(address, port) of everything on which this process listens."""
    found = psutil.Process().net_connections("inet")
    return {tuple(connection.laddr) for connection in found if connection.status == psutil.CONN_LISTEN}


class Besieged(Engine):
    """Connects when the strangers are there."""

    def __init__(self, source, come):
        super().__init__()
        self.source, self.come, self.addresses = source, come, set()

    async def connect(self, offer):
        while self.source.sender._lender is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self.addresses = listening() - self.before
        await asyncio.to_thread(self.come, sorted(port for _, port in self.addresses))
        await super().connect(offer)

    async def needs(self):
        self.before = listening()
        return await super().needs()


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_push_goes_on_among_hundreds_of_strangers_and_listens_on_no_address_but_that_of_its_host(transport):
    source = Source()
    with crowd() as come:
        engine = Besieged(source, come)
        try:
            asyncio.run(WeightSync(source, {"a": engine}, transport=transport).push(1))
        finally:
            source.close()
            engine.session.close()
    assert engine.digests() == DIGESTS
    assert len(engine.addresses) >= 2  # the store, the lender; and gloo, which has no proof
    assert {address for address, _ in engine.addresses} == {HOST}
    assert listening() <= engine.before


def test_whoever_knows_all_but_the_secret_of_a_push_gets_no_weights():
    source = Source()
    _, offer = first_push(source)
    stranger = OFFER.validate_python(OFFER.dump_python(offer) | {"secret": RunSecret.new().key})
    try:
        with pytest.raises(WeightError, match="could not join the trainer at '127.0.0.1"):
            Engine().session.connect(stranger)
    finally:
        source.close()


def test_an_offer_carries_its_secret_to_the_server_and_into_no_text():
    source = Source()
    _, offer = first_push(source)
    source.close()
    verb = VERBS["connect"]
    assert verb.parse(verb.dump({"offer": offer}))["offer"] == offer
    assert len(offer.secret) == 64
    assert offer.secret not in repr(offer)


@pytest.fixture
def rendezvous():
    found = Rendezvous.open(HOST, RunSecret.new(), Deadline(SECONDS))
    yield found
    found.close()


@pytest.fixture
def lender(rendezvous):
    found = Lender("rank 0", "trainer rank 0", HOST, rendezvous, {3, 4})
    yield found
    found.close()


def connected(rendezvous, said):
    """One that has the secret, and says this."""
    port = json.loads(rendezvous.ask("moerl/lender/rank 0"))["port"]
    connection = socket.create_connection((HOST, port), timeout=SECONDS)
    rendezvous.secret.prove(connection, SECONDS)
    connection.sendall(said)
    return connection


@pytest.mark.parametrize(
    "said",
    [b"[]\n", b"\n", b" a\n", b"x a\n", b"5 a\n", b"1e400 a\n", b"3" * 10**4 + b" a\n", b"\xff\n", b"x" * 2**17],
    ids=range(9),
)  # fmt: skip
def test_a_hello_that_is_none_ends_its_connection_and_the_others_still_come(rendezvous, lender, said):
    with connected(rendezvous, b"") as silent:  # for as long as it likes
        with connected(rendezvous, said) as odd, suppress(ConnectionResetError):
            assert odd.recv(1) == b""
        readers = [connected(rendezvous, b"%d a reader\n" % number) for number in (3, 4)]
        lender.accept(Deadline(SECONDS))
    for reader in readers:
        reader.close()
    silent.close()


def test_a_reader_comes_once_and_the_port_is_closed_when_all_have_come(rendezvous, lender):
    first = connected(rendezvous, b"3 first\n")
    while 3 not in lender._links:
        threading.Event().wait(0.01)
    with connected(rendezvous, b"3 second\n") as second:
        assert second.recv(1) == b""
    other = connected(rendezvous, b"4 other\n")
    lender.accept(Deadline(SECONDS))
    assert lender._links[3].peer == "first"
    with pytest.raises(ConnectionRefusedError):
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:  # the thread that let in the last one closes it
            with suppress(StrangerError, ConnectionResetError):  # it was being closed
                connected(rendezvous, b"").close()
    first.close()
    other.close()


def test_a_process_that_may_open_no_more_files_is_not_told_to_look_at_the_network():
    with pytest.raises(WeightError, match=r"\[Errno 24\] Too many open files\); this process, .* `ulimit -n`"), explained("no"):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with pytest.raises(WeightError, match="see that every rollout server is alive and reaches"), explained("no"):
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
