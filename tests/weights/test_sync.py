"""The driver's side, over real sessions in this process."""

import asyncio
import socket
from dataclasses import replace

import pytest
import torch
from session_process import MODEL, SPECS, Engine, Source

from moerl.cluster.error_texts import LEFT
from moerl.types.errors import EngineError, HangError, TrainError, WeightError
from moerl.weights.push_calls import PushCalls
from moerl.weights.sync import WeightSync, resolve_transport

EXPERT = "layers.0.mlp.experts.0.up_proj.weight"
"""In the first bucket."""


@pytest.fixture
def source():
    source = Source()
    yield source
    source.close()


class Recorded(Engine):
    """Counts its installs."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.num_installs = 0

    async def install(self):
        self.num_installs += 1
        await super().install()


class Silent(Recorded):
    """Never answers an install."""

    async def install(self):
        await asyncio.Event().wait()


class Unreachable(Recorded):
    async def install(self):
        self.session.close()
        raise EngineError("127.0.0.1:1: it is not there")


def test_a_push_brings_all_receivers_to_the_version(source):
    engines = {name: Engine() for name in "abc"}
    stats = asyncio.run(WeightSync(source, engines, transport="ipc").push(7))
    assert [engine.session._last.version for engine in engines.values()] == [7, 7, 7]
    assert all(torch.equal(engine.tensors["embed.weight"], MODEL["embed.weight"]) for engine in engines.values())
    assert (stats.version, stats.num_tensors) == (7, len(MODEL))
    assert stats.seconds > 0


def test_all_refusals_are_named_before_any_byte_moves(source):
    smaller = {name: spec for name, spec in SPECS.items() if name != "steps"}
    engines = {"good": Recorded(), "old": Recorded(specs=smaller), "older": Recorded(specs=smaller)}
    with pytest.raises(WeightError, match="at begin;") as caught:
        asyncio.run(WeightSync(source, engines, transport="ipc").push(1))
    assert "* old: WeightError: push of version 1 refused" in str(caught.value)
    assert "* older: WeightError: push of version 1 refused" in str(caught.value)
    assert "* good" not in str(caught.value)
    assert [engine.num_installs for engine in engines.values()] == [0, 0, 0]


def test_every_failing_receiver_is_named_with_its_cause(source):
    engines = {"good": Recorded(), "damaging": Recorded(damages=EXPERT), "gone": Unreachable()}
    with pytest.raises(WeightError, match="at the transfer;") as caught:
        asyncio.run(WeightSync(source, engines, transport="ipc").push(1))
    assert f"* damaging: WeightError: tensor {EXPERT!r}" in str(caught.value)
    assert "* gone: EngineError: 127.0.0.1:1: it is not there" in str(caught.value)
    assert isinstance(caught.value.__cause__, EngineError)
    assert all(engine.session._push is None for engine in engines.values())


def test_a_silent_receiver_is_named_after_the_deadline(source):
    engines = {"good": Recorded(), "silent": Silent()}
    sync = WeightSync(source, engines, transport="ipc", deadline_seconds=6, settle_seconds=0.5)
    with pytest.raises(WeightError, match=r"\* silent: did not end in time and was cancelled\nlost them, or") as caught:
        asyncio.run(sync.push(1))
    # Their deadlines end at about one time: either may be first, and the other then hears that it left.
    good, trainer = sorted(str(caught.value).splitlines()[-2:])
    assert trainer == "* trainer: WeightError: word that bucket 0 of trainer rank 0 is installed did not come within 5.4 s from silent"
    late, left = "bucket 2 of trainer rank 0 did not come", "trainer rank 0 left the push; "
    assert good.removeprefix("* good: WeightError: ").startswith((f"{left}{late}", f"{late} within 5.4 s"))


def test_a_silent_receiver_does_not_hide_another_s_failure(source):
    engines = {"silent": Silent(), "gone": Unreachable()}
    sync = WeightSync(source, engines, transport="ipc", deadline_seconds=60, settle_seconds=0.5)
    with pytest.raises(WeightError, match="(?s)gone: EngineError.*silent: did not end in time"):
        asyncio.run(sync.push(1))


def test_a_cancelled_push_leaves_no_call_behind(source):
    async def cancel_while_waiting():
        push = asyncio.create_task(WeightSync(source, {"silent": Silent()}, transport="ipc", deadline_seconds=2).push(1))
        await asyncio.wait([push], timeout=0.3)
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(cancel_while_waiting()) == set()


def test_a_push_after_a_failed_one_succeeds(source):
    engines = {"good": Recorded(), "damaging": Recorded(damages="steps")}
    sync = WeightSync(source, engines, transport="ipc")
    with pytest.raises(WeightError, match="at the transfer"):
        asyncio.run(sync.push(1))
    engines["damaging"].damages = ""
    asyncio.run(sync.push(2))
    assert source.num_listens == 2
    assert [engine.session._last.version for engine in engines.values()] == [2, 2]
    assert engines["damaging"].digests() == engines["good"].digests()


class Forgetful(Engine):
    """Is told of all buckets but the first."""

    async def connect(self, offer):
        await super().connect(replace(offer, buckets=offer.buckets[1:]))


def test_a_bucket_that_a_side_leaves_out_is_found(source):
    with pytest.raises(WeightError, match="came from trainer rank 0 in place of bucket 1 of trainer rank 0: a sender drops buckets"):
        asyncio.run(WeightSync(source, {"a": Forgetful()}, transport="ipc").push(1))


def failing(index):
    if index == 1:
        raise TrainError("rank 0 failed in pack")


def test_a_failure_of_the_trainer_is_told_as_it_is():
    source = Source(before=failing)
    try:
        with pytest.raises(TrainError, match="^rank 0 failed in pack$"):
            asyncio.run(WeightSync(source, {"a": Engine(), "b": Silent()}, transport="ipc", settle_seconds=0.2).push(1))
    finally:
        source.close()


def test_where_a_cause_is_known_nobody_is_taken_for_one_that_hangs(source):
    """The slow one is well."""

    async def look(deadline, names):
        raise AssertionError((deadline, names))

    class Slow(Engine):
        async def install(self):
            await super().install()
            await asyncio.sleep(1)

    engines = {"slow": Slow(), "gone": Unreachable()}
    sync = WeightSync(source, engines, transport="ipc", deadline_seconds=60, settle_seconds=0.1, on_late=look)
    with pytest.raises(WeightError, match=r"gone: EngineError"):
        asyncio.run(sync.push(1))


def test_the_report_has_the_deadline_that_was_missed():
    """Of a side that is gone the others hear at once, and not at the deadline of the push."""
    found = []

    async def look(deadline, names):
        found.append((deadline, names))
        return HangError("it hangs")

    async def lost():
        raise WeightError("a left the push")

    calls = PushCalls(deadline_seconds=60, settle_seconds=0.05, on_late=look)
    with pytest.raises(WeightError, match="it hangs"):
        asyncio.run(calls.together("the transfer", {"trainer": lost(), "a": asyncio.sleep(60)}))
    assert found == [("0.05 s after the first failure at the transfer (deadlines.settle_seconds)", ["a"])]


@pytest.mark.parametrize("step", ["begin", "finish"])
def test_a_connection_to_one_server_that_breaks_is_no_reason_to_look_at_all(source, step):
    async def look(deadline, names):
        raise AssertionError((deadline, names))

    async def broken(*_):
        raise EngineError("server b: the server still runs: ClientOSError: Connection reset by peer")

    engines = {"a": Engine(), "b": Engine()}
    setattr(engines["b"], step, broken)
    with pytest.raises(WeightError, match=rf"at {step};.*\n\* b: EngineError: server b: the server still runs"):
        asyncio.run(WeightSync(source, engines, transport="ipc", on_late=look).push(1))


def test_when_each_side_only_lost_or_awaited_another_all_are_looked_at(source):
    """No side knows more: somebody ended a connection, or hangs where its call cannot tell."""
    asked = []

    async def look(deadline, names):
        asked.append((deadline, names))
        return HangError("transfer: nobody did it")

    class Quitting(Engine):
        async def install(self):
            self.session.close()
            raise WeightError(f"trainer rank 0 {LEFT}")

    with pytest.raises(WeightError, match=r"(?s)at the transfer.*transfer: nobody did it$") as caught:
        asyncio.run(WeightSync(source, {"a": Quitting()}, transport="ipc", on_late=look).push(1))
    assert isinstance(caught.value.__cause__, HangError)
    assert asked == [("5 s after the first failure at the transfer (deadlines.settle_seconds)", ["trainer", "a"])]


@pytest.mark.parametrize(
    ("source_hosts", "receiver_hosts", "expected"),
    [
        (["127.0.0.1"], ["127.0.0.1", "localhost"], "ipc"),
        (["127.0.0.1"], [socket.gethostname()], "ipc"),
        (["127.0.0.1"], ["127.0.0.1", "192.0.2.7"], "nccl"),
        (["192.0.2.7"], ["192.0.2.7", "192.0.2.7"], "ipc"),
        (["192.0.2.7"], ["127.0.0.1"], "nccl"),
        (["127.0.0.1", "192.0.2.7"], ["127.0.0.1"], "nccl"),
    ],
)
def test_auto_is_shm_only_when_ranks_and_servers_are_on_one_host(source_hosts, receiver_hosts, expected):
    assert resolve_transport("auto", source_hosts=source_hosts, receiver_hosts=receiver_hosts, shares_gpus=False) == expected


@pytest.mark.parametrize(("receiver_hosts", "expected"), [(["192.0.2.7", "192.0.2.8"], "relay"), (["192.0.2.7", "192.0.2.9"], "nccl")])
def test_ranks_relay_where_servers_share_their_gpus_and_no_host_has_servers_alone(receiver_hosts, expected):
    hosts = {"source_hosts": ["192.0.2.7", "192.0.2.8"], "receiver_hosts": receiver_hosts}
    assert [resolve_transport("auto", **hosts, shares_gpus=shares) for shares in (True, False)] == [expected, "nccl"]


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_named_transport_is_taken_as_it_is(transport):
    assert resolve_transport(transport, source_hosts=["127.0.0.1"], receiver_hosts=["192.0.2.7"], shares_gpus=True) == transport
