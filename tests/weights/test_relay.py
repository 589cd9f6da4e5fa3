"""Over a network every byte crosses once to a node, and on from there in memory; told by the plan, and by the sockets themselves."""

import asyncio
import os
import socket
import stat
import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from session_process import EngineProcess, Halves, Source
from test_deliveries import an_outline, shares

from moerl.config.layout import Layout
from moerl.push_types import Bucket
from moerl.types import WeightError
from moerl.weights.digest import tensor_digest
from moerl.weights.fleet_plan import Outline, plan_deliveries, plan_of_run
from moerl.weights.relay import NUM_SLOTS, Relays
from moerl.weights.spec import expert_of, spec_of
from moerl.weights.sync import WeightSync

BUCKET_BYTES = 100_000
MODEL = {f"layers.{layer}.experts.{expert}.up": torch.full((100, 50), layer + expert / 8) for layer in range(2) for expert in range(4)}
MODEL |= {f"layers.{layer}.attention": torch.linspace(layer, 1, 90_000).reshape(300, 300) for layer in range(2)} | {"norm": torch.ones(70)}


def needs_of(process: int, num_processes: int) -> list[str]:
    """The experts of a process are every `num_processes`-th half."""
    size = 4 // num_processes
    return [name for name in MODEL if (expert := expert_of(name)) is None or expert // size == process]


def bucket(number: int, *readers: int) -> Bucket:
    return Bucket(sender=number, index=0, num_bytes=1, entries=(), readers=readers)


async def install_all(install, buckets):
    """What came of each; all at once."""
    relays = Relays({found.sender: (found,) for found in buckets}, install)
    installing = asyncio.gather(*map(relays.install, buckets), return_exceptions=True)
    outcomes = await asyncio.wait_for(installing, timeout=60)
    assert all(outcome is None or isinstance(outcome, WeightError) for outcome in outcomes), outcomes
    return outcomes


def test_a_bucket_goes_to_its_first_reader_and_from_there_to_the_others():
    calls = []

    async def install(given):
        calls.append((given.readers, given.relay, given.slot))

    asyncio.run(install_all(install, [bucket(0, 5, 3, 4)]))
    asyncio.run(install_all(install, [bucket(0, 7)]))
    assert calls == [((5,), None, 0), ((3, 4), 5, 0), ((7,), None, 0)]


def test_what_a_reader_gets_from_senders_comes_one_by_one_in_the_order_of_the_rounds():
    arrived, arriving = [], Counter[int]()

    async def install(given):
        if given.relay is None:
            (first,) = given.readers
            arriving[first] += 1
            assert arriving[first] == 1
            await asyncio.sleep(0)
            arriving[first] -= 1
            arrived.append((first, given.round))

    buckets = [replace(bucket(number, number % 2, 2), round=-number) for number in range(8)]
    asyncio.run(install_all(install, buckets))
    assert [number for first, number in arrived if first == 0] == [-6, -4, -2, 0]
    assert [number for first, number in arrived if first == 1] == [-7, -5, -3, -1]


def test_memory_is_filled_again_only_when_all_its_readers_have_installed():
    held: dict[tuple[int, int], int] = {}
    most = Counter[int]()

    async def install(given):
        relay = given.readers[0] if given.relay is None else given.relay
        if given.relay is None:
            assert (relay, given.slot) not in held
            held[relay, given.slot] = given.sender
        most[relay] = max(most[relay], sum(key[0] == relay for key in held))
        for _ in range(given.sender % 4):
            await asyncio.sleep(0)
        assert held[relay, given.slot] == given.sender
        if given.relay is not None:
            del held[relay, given.slot]

    asyncio.run(install_all(install, [bucket(number, number % 2, 2, 3) for number in range(20)]))
    assert held == {}
    assert most == {0: NUM_SLOTS, 1: NUM_SLOTS}


def test_memory_of_a_bucket_that_failed_is_free_again():
    async def install(given):
        raise WeightError("no")

    outcomes = asyncio.run(install_all(install, [bucket(number, 0, 1) for number in range(NUM_SLOTS + 1)]))
    assert [type(outcome) for outcome in outcomes] == [WeightError] * (NUM_SLOTS + 1)


# -- the plan of a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [{"a": ["x"], "b": ["x"]}, {"a": ["x"], "b": ["y"]}, {"a": ["x", "y"], "b": ["x", "y"]}])
def test_what_the_buckets_bring_to_every_process_is_what_the_plan_says(nodes):
    outline = replace(an_outline(), bucket_bytes=150)
    needs = {server: shares(outline, 2, 4) for server in nodes}
    plan = plan_of_run(outline, needs, nodes)
    over_network, within = np.zeros(8, dtype=np.int64), np.zeros(8, dtype=np.int64)
    node_of = plan.rollout.node_numbers()
    rounds: list[tuple[int, str, int]] = []
    for rank, job in plan_deliveries(outline, needs, nodes).jobs.items():
        assert [found.round for found in job] == sorted(found.round for found in job)
        for found in job:
            first, *others = found.readers
            assert {node_of[first]} == {node_of[reader] for reader in found.readers}
            size = sum(entry.num_bytes for entry in found.entries)
            over_network[first] += size
            within[others] += size
            rounds += [(found.round, "out", rank), (found.round, "in", first)]
    np.testing.assert_array_equal(over_network, plan.received())
    np.testing.assert_array_equal(within, plan.spread_in_node())
    assert len(set(rounds)) == len(rounds)
    for node in set(node_of.tolist()):
        read_there = {name for server, names in enumerate([*needs["a"], *needs["b"]]) if node_of[server] == node for name in names}
        assert over_network[node_of == node].sum() == sum(tensor.num_bytes for tensor in outline.tensors if tensor.name in read_there)


def test_a_server_whose_processes_do_not_fill_its_nodes_equally_is_refused():
    outline = Outline(tensors=an_outline().tensors, layout=Layout(ranks=2, ep=2), bucket_bytes=1000)
    with pytest.raises(WeightError, match="2 model processes of a server on 3 nodes"):
        plan_deliveries(outline, {"a": shares(outline, 2, 2)}, {"a": ["x", "y", "z"]})


# -- real processes --------------------------------------------------------------------------------------------


def two_processes() -> Halves:
    specs = {name: spec_of(name, tensor) for name, tensor in MODEL.items()}
    return Halves(*(EngineProcess(specs=specs, needs=needs_of(process, 2)) for process in range(2)))


def sent_by_sockets() -> int:
    """Bytes that this process's TCP sockets have sent, each once (struct tcp_info of linux/tcp.h: tcpi_bytes_sent, tcpi_bytes_retrans)."""
    total = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    sent, again = struct.unpack_from("QQ", found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 200)
                    total += sent - again
        except OSError:  # the descriptor of the listing itself
            continue
    return total


def test_the_network_carries_to_every_node_what_it_reads_once():
    servers = {name: two_processes() for name in "abc"}
    nodes = {"a": ["x"], "b": ["x"], "c": ["y"]}
    source = Source(model=MODEL, bucket_bytes=BUCKET_BYTES, timeout_seconds=60)
    try:
        sync = WeightSync(source, servers, transport="nccl", nodes=nodes)

        async def push_and_count():
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(8))  # all wait for each other in connect
            await sync.push(1)  # connections, and what they say to each other first
            before = sent_by_sockets()
            source.model = {name: tensor * 2 for name, tensor in MODEL.items()}
            return await sync.push(2), sent_by_sockets() - before

        stats, by_sockets = asyncio.run(push_and_count())
        of_model = sum(tensor.nbytes for tensor in MODEL.values())
        plan = plan_of_run(asyncio.run(source.outline()), {name: asyncio.run(server.needs()) for name, server in servers.items()}, nodes)
        assert stats.num_network == 2 * of_model == plan.received().sum()
        # gloo's headers and the padding between pieces; less than a hundredth of the model, which a second copy would exceed
        assert stats.num_network <= by_sockets < stats.num_network + 0.01 * of_model
        for server in servers.values():
            for number, process in enumerate(server.processes):
                assert process.call("digests") == {name: tensor_digest(source.model[name]) for name in needs_of(number, 2)}
    finally:
        source.close()
        for process in (process for server in servers.values() for process in server.processes):
            process.close()
