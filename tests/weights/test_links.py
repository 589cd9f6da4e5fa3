"""Senders and readers that lead each other through the buckets of any plan: all ends, nothing is overwritten while it is read."""

import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moerl.cluster.run_secret import RunSecret
from moerl.types.errors import WeightError
from moerl.types.push import Bucket, TransportOffer
from moerl.weights.plan.buckets import Deliveries, in_order, relayed, restricted
from moerl.weights.plan.schedule import first_fit
from moerl.weights.plan.spec_tensors import CPU
from moerl.weights.send import WeightSender
from moerl.weights.transport.links import Link
from moerl.weights.transport.rendezvous import Deadline
from moerl.weights.weight_session import Incoming

SECONDS = 60.0
SECRET = RunSecret.new()


RANKS_OF = {0: (0, 1), 3: (2, 3)}
"""Node -> its trainer ranks; rank 3 sends nothing. Readers 0 to 2 are of node 0, and 3 and 4 of node 3."""
RELAY_OF = {0: 1, 1: 0, 2: 1, 3: 3, 4: 2}
"""Reader -> the rank that gets for it what comes from other nodes."""


def relay_of(transport, sender, readers):
    if transport != "relay":
        return None
    return sender if sender in RANKS_OF[readers[0] // 3 * 3] else RELAY_OF[readers[0]]


def jobs_of(edges, transport):
    """`edges`: (sender, readers) of every bucket."""
    relays = [relay_of(transport, *edge) for edge in edges]
    targets = {"ipc": lambda readers, _: readers, "nccl": lambda readers, _: readers[:1], "relay": lambda _, relay: (relay,)}[transport]
    found = first_fit(
        [(sender, () if relay == sender else targets(readers, relay))] for (sender, readers), relay in zip(edges, relays, strict=True)
    )
    rounds = [number for (number,) in found]
    jobs: dict[int, list[Bucket]] = {}
    for number in sorted(range(len(edges)), key=lambda number: (rounds[number], number)):
        sender, readers = edges[number]
        mine = jobs.setdefault(sender, [])
        bucket = Bucket(sender=sender, index=len(mine), num_bytes=8, entries=(), readers=readers, round=rounds[number])
        mine.append(replace(bucket, relay=relays[number]))
    return {sender: tuple(job) for sender, job in jobs.items()}


class Sender(WeightSender):
    """Fills a bucket with its own number; the last byte is the push's."""

    num_pushes = 0

    def pack(self, index):
        data = self._buffers[index % 2].reserve(8)
        data[:] = torch.tensor([self._job[0].sender, index // 256, index % 256, 0, 0, 0, 0, self.num_pushes], dtype=torch.uint8)
        return data

    def send(self):
        self.num_pushes += 1
        return super().send()


def read_all(incoming, push, delays):
    """What came, in order; every bucket's bytes must be its own for as long as they are used."""
    found = []
    for bucket, data in incoming.buckets():
        for _ in range(2):
            assert data.tolist() == [bucket.sender, bucket.index // 256, bucket.index % 256, 0, 0, 0, 0, push]
            time.sleep(delays.random() / 1000)
        found.append((bucket.sender, bucket.index))
    return found


@st.composite
def plans(draw):
    """Readers 0 to 2 are of one node, 3 and 4 of another."""
    num_edges = draw(st.integers(1, 30))
    nodes = st.sampled_from([(0, 1, 2), (3, 4)])
    edges = []
    for _ in range(num_edges):
        readers = draw(nodes.flatmap(st.permutations))
        edges.append((draw(st.integers(0, 2)), tuple(readers[: draw(st.integers(1, len(readers)))])))
    return edges


@settings(deadline=None, max_examples=25)
@given(edges=plans(), transport=st.sampled_from(["ipc", "nccl", "relay"]), gone=st.sets(st.integers(0, 4)), seed=st.integers(0, 1000))
def test_every_plan_ends_push_after_push_and_every_bucket_comes_once_to_each_reader(edges, transport, gone, seed):
    """`gone`: readers for whom it was made too, and that are not there."""
    left = {reader: number for number, reader in enumerate(reader for reader in range(5) if reader not in gone)}
    jobs, num_readers = restricted(Deliveries(tensors=(), jobs=jobs_of(edges, transport)), left).jobs, len(left)
    assume(jobs)
    passed_on = relayed(jobs)
    members = sorted({*jobs, *passed_on})
    ranks = [(rank, jobs.get(rank, ()), passed_on.get(rank, ())) for rank in members]
    senders = [Sender(transport, job, None, seconds=SECONDS, secret=SECRET, rank=rank, relayed=mine) for rank, job, mine in ranks]
    address, *_ = [sender.listen(is_first=place == 0) for place, sender in enumerate(senders)]
    order = tuple(in_order(jobs))

    def connect(reader):
        offer = TransportOffer(
            transport=transport, address=address, server=f"reader {reader}", senders=tuple(sorted(jobs)), num_readers=num_readers,
            reader=reader, buckets=order, seconds=SECONDS, secret=SECRET.key,
        )  # fmt: skip
        return Incoming(offer, device=CPU, read=None)

    incoming = []
    with ThreadPoolExecutor(16) as pool:
        try:
            joining = [pool.submit(sender.connect, address, senders=members, num_readers=num_readers) for sender in senders]
            incoming += pool.map(connect, range(num_readers))
            for each in joining:
                each.result()
            for push in (1, 2):
                sending = [pool.submit(sender.send) for sender in senders]
                reading = [pool.submit(read_all, each, push, random.Random(seed + number)) for number, each in enumerate(incoming)]
                assert [each.result() for each in sending] == [0] * len(senders)
                for reader, each in enumerate(reading):
                    expected = sorted((bucket.sender, bucket.index) for bucket in order if reader in bucket.readers)
                    assert sorted(each.result()) == expected
        finally:
            for each in (*senders, *incoming):
                each.close()


def test_gloo_s_connections_close_although_the_traceback_of_a_failure_is_kept():
    """Rank 0 fails, so the reader does, for which rank 1 waits, with more than the kernel's buffers hold. Its connections close with the
    last reference to the group, or to what was begun on it."""

    class Failing(WeightSender):
        def pack(self, index):
            if (self._job[0].sender, index) == (0, 1):
                time.sleep(0.2)  # until the others wait
                raise KeyError("a fault of the trainer")
            return self._buffers[index % 2].reserve(self._job[index].num_bytes)[: self._job[index].num_bytes]

    sizes = {0: (8, 8), 1: (2**26,)}
    jobs = {
        sender: tuple(
            Bucket(sender=sender, index=index, num_bytes=size, entries=(), readers=(0,), round=2 * sender + index)
            for index, size in enumerate(mine)
        )
        for sender, mine in sizes.items()
    }
    senders = [Failing("nccl", job, None, seconds=SECONDS, secret=SECRET, rank=rank) for rank, job in jobs.items()]
    address, _ = [sender.listen(is_first=place == 0) for place, sender in enumerate(senders)]
    offer = TransportOffer(
        transport="nccl", address=address, server="reader", senders=(0, 1), num_readers=1, reader=0, buckets=tuple(in_order(jobs)),
        seconds=SECONDS, secret=SECRET.key,
    )  # fmt: skip

    def read():
        try:
            list(incoming.buckets())
        except WeightError:
            incoming.close()
            raise

    with ThreadPoolExecutor(3) as pool:
        joining = [pool.submit(sender.connect, address, senders=(0, 1), num_readers=1) for sender in senders]
        incoming = Incoming(offer, device=CPU, read=None)
        for each in joining:
            each.result()
        started = time.monotonic()
        ending = [pool.submit(work) for work in (senders[0].send, senders[1].send, read)]
        errors = [each.exception() for each in ending]  # which keeps them
    assert [type(error) for error in errors] == [KeyError, WeightError, WeightError]
    assert time.monotonic() - started < SECONDS / 2
    for sender in senders:
        sender.close()


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        link = Link(server.accept()[0], "the other side")
    yield link, theirs
    link.close()
    theirs.close()


@pytest.mark.parametrize("said", [b"", b"half a line"])
def test_a_side_that_ends_is_heard_at_once(pair, said):
    link, theirs = pair
    theirs.sendall(said)
    link.check()
    threading.Timer(0.1, lambda: theirs.shutdown(socket.SHUT_RDWR)).start()
    with pytest.raises(WeightError, match="the other side left the push; bucket 3 did not come"):
        link.hear("bucket 3", Deadline(SECONDS))


@pytest.mark.parametrize("unheard", [b"", b"0 3 somewhere\n"])
def test_a_side_that_is_gone_is_found_by_one_that_waits_for_something_else(pair, unheard):
    link, theirs = pair
    theirs.sendall(unheard)
    link.check()
    theirs.shutdown(socket.SHUT_RDWR)
    with pytest.raises(WeightError, match="the other side left the push$"):
        link.check()


def test_a_side_that_says_nothing_is_waited_for_until_the_deadline(pair):
    with pytest.raises(WeightError, match="bucket 3 did not come within 0.05 s from the other side"):
        pair[0].hear("bucket 3", Deadline(0.05))
