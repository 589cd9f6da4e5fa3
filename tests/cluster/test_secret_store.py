"""Store of a run: torch's interface for those that have the secret, and nothing for those that have not."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, ProcessGroupGloo

from moerl.cluster import secret_listener
from moerl.cluster.run_secret import RunSecret, StrangerError
from moerl.cluster.secret_store import MAX_MESSAGE_BYTES, SecretStore

HOST, SECONDS = "127.0.0.1", 30.0
SECRET = RunSecret.new()


@pytest.fixture
def store():
    opened = SecretStore.open(HOST, SECRET, SECONDS)
    yield opened
    opened.close()


@pytest.fixture
def joined(store):
    other = SecretStore.join(HOST, store.port, SECRET, SECONDS)
    yield other
    other.close()


def test_both_sides_see_what_the_other_has_set(store, joined):
    joined.set("a", b"\x00\xff")
    store.set("b", "text")
    assert (store.get("a"), joined.get("b"), joined.check(["a", "b"]), joined.check(["a", "c"])) == (b"\x00\xff", b"text", True, False)
    assert [joined.add("n", 2), store.add("n", 3), int(joined.get("n"))] == [2, 5, 5]


def test_a_value_is_waited_for_while_the_same_side_goes_on_with_other_calls(store, joined):
    with ThreadPoolExecutor(2) as pool:
        here, there = pool.submit(store.get, "later"), pool.submit(joined.get, "later")
        assert not joined.check(["later"])
        joined.set("later", "1")
        assert (here.result(SECONDS), there.result(SECONDS)) == (b"1", b"1")


def test_a_value_that_does_not_come_is_named_after_the_time_that_was_given(store, joined):
    for side in (store, joined):
        with pytest.raises(DistStoreError, match=r"wait timeout after 0.05 s, key: x/never"):
            PrefixStore("x", side).wait(["never"], timedelta(seconds=0.05))


def test_who_waits_hears_that_the_store_closes(store, joined):
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(side.get, "never") for side in (store, joined)]
        time.sleep(0.1)  # until they do; if they did not yet, the test would pass too
        store.close()
        errors = [each.exception(SECONDS) for each in waiting]
    assert all(isinstance(error, DistStoreError | DistNetworkError) for error in errors)
    with pytest.raises(DistNetworkError):
        joined.check(["a"])


def test_gloo_s_group_is_built_on_it_by_ranks_of_which_one_has_the_store(store):
    """The group's calls come from C++, by way of a PrefixStore and its clone."""

    def rank(number):
        mine = store if number == 0 else SecretStore.join(HOST, store.port, SECRET, SECONDS)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = timedelta(seconds=SECONDS)
        group = ProcessGroupGloo(PrefixStore("group", mine).clone(), number, 3, options)
        summed = torch.tensor([2.0**number])
        group.allreduce([summed]).wait()
        return summed.item(), group, mine

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(rank, range(3)))
    assert [result[0] for result in results] == [7.0, 7.0, 7.0]
    for _, _, mine in results:
        mine.close()


def test_whoever_has_another_secret_joins_nothing(store):
    store.set("weights", "precious")
    with pytest.raises(StrangerError):
        SecretStore.join(HOST, store.port, RunSecret.new(), 2.0)


@pytest.mark.parametrize("said", [b"\x0c\x00\x00\x00\x03\x00\x00\x00set", b"GET / HTTP/1.1\r\n\r\n" * 20, b"\x00" * 4096])
def test_what_a_stranger_says_changes_nothing_and_tells_it_nothing(store, said):
    store.set("weights", "precious")
    with socket.create_connection((HOST, store.port)) as connection:
        connection.settimeout(SECONDS)
        heard = b""
        with suppress(OSError):  # it may be reset at any time
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(2**16):
                heard += chunk
    assert len(heard) <= 32  # the nonce
    assert b"precious" not in heard
    assert store.get("weights") == b"precious"


def test_a_message_that_claims_to_be_endless_ends_its_connection_and_no_other(store, joined):
    with secret_listener.connect_proven(HOST, store.port, SECRET, SECONDS) as connection:
        connection.settimeout(SECONDS)
        connection.sendall((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))
        assert connection.recv(1) == b""
    joined.set("a", "1")
    assert store.get("a") == b"1"


def test_strangers_are_so_many_at_most_and_the_oldest_goes_first(store, monkeypatch):
    monkeypatch.setattr(secret_listener, "MAX_STRANGERS", 4)
    strangers = [socket.create_connection((HOST, store.port)) for _ in range(8)]
    try:
        for stranger in strangers:
            stranger.settimeout(SECONDS)
            assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
        for stranger in strangers[:4]:
            assert stranger.recv(1) == b""
        SecretStore.join(HOST, store.port, SECRET, SECONDS).close()  # one more ends, and this one does not
        strangers[5].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[5].recv(1)
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_stranger_that_says_nothing_is_dropped_after_some_seconds(store, monkeypatch):
    monkeypatch.setattr(secret_listener, "PROOF_SECONDS", 0.1)
    with socket.create_connection((HOST, store.port)) as stranger:
        stranger.settimeout(SECONDS)
        assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
        assert stranger.recv(1) == b""


def test_a_closed_store_leaves_no_port_and_no_thread():
    before = set(threading.enumerate())
    opened = SecretStore.open(HOST, SECRET, SECONDS)
    joined = SecretStore.join(HOST, opened.port, SECRET, SECONDS)
    with socket.create_connection((HOST, opened.port)):
        opened.close()
        joined.close()
        end = time.monotonic() + SECONDS
        while set(threading.enumerate()) - before and time.monotonic() < end:
            time.sleep(0.01)
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, opened.port))
