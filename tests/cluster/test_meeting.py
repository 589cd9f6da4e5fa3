"""Nodes that meet over real connections: who comes, who does not, who goes."""

import asyncio
import gc
import json
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from moerl.cluster import secret_listener
from moerl.cluster.run_secret import RunSecret
from moerl.slurm.allocation import AllocatedNode
from moerl.slurm.meeting import addresses_of, common_address, hold_meeting, join_meeting
from moerl.types.errors import MoerlError


def facts(name: str) -> AllocatedNode:
    return AllocatedNode(name=name, gpus=("H100",), num_cpus=2, versions={"ray": "2.60.0"})


def test_nodes_meet_and_hear_what_the_first_says(tmp_path: Path):
    file = tmp_path / "meeting.json"

    async def first() -> list[AllocatedNode]:
        async with hold_meeting(file, "lo") as meeting:
            guests = await meeting.gather(["n2", "n1"], 10)
            assert common_address(guests) == "127.0.0.1"
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, "the token is in it"
            for guest in guests:
                await guest.link.tell(ray="here")
            return [guest.facts for guest in guests]

    async def other(name: str) -> tuple[object, object]:
        link, token = await join_meeting(file, facts(name), 10)
        assert len(token) == 64
        return await link.hear(), await link.hear()

    async def all_of_them() -> list[object]:
        return await asyncio.gather(first(), other("n1"), other("n2"))

    came, heard, also_heard = asyncio.run(all_of_them())
    assert came == [facts("n2"), facts("n1")]
    assert heard == also_heard == ({"ray": "here"}, None), "then the first node is gone"
    assert not file.exists()


def test_who_does_not_come_is_named(tmp_path: Path):
    async def first() -> None:
        async with hold_meeting(tmp_path / "meeting.json", None) as meeting:
            await asyncio.gather(join_meeting(tmp_path / "meeting.json", facts("n1"), 10), meeting.gather(["n1", "n2", "n3"], 1.0))

    with pytest.raises(MoerlError, match=r"n2, n3 did not come within slurm\.start_seconds = 1;"):
        asyncio.run(first())


def test_a_node_without_the_token_is_nobody_and_is_told(tmp_path: Path):
    file = tmp_path / "meeting.json"

    async def first() -> None:
        async with hold_meeting(file, "lo") as meeting:
            place = json.loads(file.read_text())
            file.write_text(json.dumps({**place, "token": "0" * 64}))
            with pytest.raises(
                MoerlError, match=r"not reachable at port \d+ \(127\.0\.0\.1: the other side left before it had proven itself"
            ):
                await join_meeting(file, facts("n1"), 10)
            await meeting.gather(["n1"], 0.2)

    with pytest.raises(MoerlError, match="n1 did not come"):
        asyncio.run(first())


def test_without_a_first_node_the_shared_storage_is_asked_for(tmp_path: Path):
    with pytest.raises(MoerlError, match=r"meeting\.json after slurm\.start_seconds = 0\.5: .* not on storage that all nodes share"):
        asyncio.run(join_meeting(tmp_path / "meeting.json", facts("n1"), 0.5))


@pytest.mark.parametrize("said", [b'{"name": "n1"}\n', b"[]\n", b"what\n"])
def test_a_node_that_cannot_be_read_is_closed_and_the_log_says_so(said: bytes, tmp_path: Path, caplog):
    file = tmp_path / "meeting.json"

    async def first() -> None:
        async with hold_meeting(file, "lo"):
            place = json.loads(file.read_text())
            secret = RunSecret(key=place["token"])
            connection = await asyncio.to_thread(secret_listener.connect_proven, "127.0.0.1", place["port"], secret, 10)
            reader, writer = await asyncio.open_connection(sock=connection)
            writer.write(said)
            async with asyncio.timeout(10):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(first())
    (told,) = [record.getMessage() for record in caplog.records if record.name == "moerl.slurm.meeting"]
    assert told.startswith("a node at 127.0.0.1 tells what this one cannot read")


def test_an_interface_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(MoerlError, match=r"network\.interface = 'ib9': no such network interface .* there are .*lo"):
        addresses_of("ib9")


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n" * 20, b"x" * 2**20, b""])
def test_a_stranger_is_closed_and_nothing_of_it_is_an_error(said: bytes, tmp_path: Path, caplog, monkeypatch):
    monkeypatch.setattr(secret_listener, "PROOF_SECONDS", 0.3)
    file = tmp_path / "meeting.json"

    async def first() -> list[AllocatedNode]:
        async with hold_meeting(file, "lo") as meeting:
            reader, writer = await asyncio.open_connection("127.0.0.1", json.loads(file.read_text())["port"])
            writer.write(said)
            async with asyncio.timeout(10):
                with suppress(ConnectionError):
                    assert len(await reader.read()) <= 32, "the nonce"
            writer.close()
            await join_meeting(file, facts("n1"), 10)
            return [guest.facts for guest in await meeting.gather(["n1"], 10)]

    assert asyncio.run(first()) == [facts("n1")]
    gc.collect()  # asyncio tells of what a task raised when the task goes
    assert [record.getMessage() for record in caplog.records if record.exc_info or record.name == "asyncio"] == []
