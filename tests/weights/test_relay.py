"""Over a network every byte crosses once to a node, and on from there in memory; told by the plan, and by the sockets themselves."""

import asyncio
import os
import socket
import stat
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from ranked_source import RankedSource
from session_process import EngineProcess, Halves, Source
from test_deliveries import an_outline, shares

from moerl.config.schema.layout import Layout
from moerl.types.errors import WeightError
from moerl.weights.plan.run_plan import Outline, RankPlaces, plan_deliveries, plan_of_run
from moerl.weights.plan.spec_tensors import spec_of
from moerl.weights.plan.tensor_specs import expert_of
from moerl.weights.sync import WeightSync
from moerl.weights.verify.digest import tensor_digest

BUCKET_BYTES = 100_000
MODEL = {f"layers.{layer}.experts.{expert}.up": torch.full((100, 50), layer + expert / 8) for layer in range(2) for expert in range(4)}
MODEL |= {f"layers.{layer}.attention": torch.linspace(layer, 1, 90_000).reshape(300, 300) for layer in range(2)} | {"norm": torch.ones(70)}


def needs_of(process: int, num_processes: int) -> list[str]:
    """The experts of a process are every `num_processes`-th half."""
    size = 4 // num_processes
    return [name for name in MODEL if (expert := expert_of(name)) is None or expert // size == process]


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


SOURCES = {
    "nccl": (lambda: Source(model=MODEL, bucket_bytes=BUCKET_BYTES), None),
    "relay": (lambda: RankedSource(MODEL, Layout(ranks=4, pp=2, ep=2), bucket_bytes=BUCKET_BYTES), ["x", "x", "y", "y"]),
    "relay, replicas": (lambda: RankedSource(MODEL, Layout(ranks=4, pp=2, ep=1), bucket_bytes=BUCKET_BYTES), ["x", "y", "x", "y"]),
}
"""Kind of source, and nodes of its ranks. Stages on nodes: half of the model crosses to each. Replicas on nodes: nothing does."""


@pytest.mark.parametrize("case", SOURCES)
def test_the_network_carries_to_every_node_what_it_reads_and_has_not_once(case):
    servers = {name: two_processes() for name in "abc"}
    nodes = {"a": ["x"], "b": ["x"], "c": ["y"]}
    (make, rank_nodes), ranks = SOURCES[case], None
    source = make()
    if rank_nodes is not None:
        ranks = RankPlaces(nodes=rank_nodes, gpus=[0, 1, 0, 1], server_gpus={"a": [0, 1], "b": [0, 1], "c": [0, 1]})
    try:
        sync = WeightSync(source, servers, transport=case.partition(",")[0], nodes=nodes, ranks=ranks)

        async def push_and_count():
            await sync.push(1)  # connections, and what they say to each other first
            before = sent_by_sockets()
            source.model = {name: tensor * 2 for name, tensor in MODEL.items()}
            return await sync.push(2), sent_by_sockets() - before

        stats, by_sockets = asyncio.run(push_and_count())
        of_model = sum(tensor.nbytes for tensor in MODEL.values())
        needs = {name: asyncio.run(server.needs()) for name, server in servers.items()}
        plan = plan_of_run(asyncio.run(source.outline()), needs, nodes, ranks)
        assert stats.num_network == {"nccl": 2, "relay": 1, "relay, replicas": 0}[case] * of_model == plan.received().sum()
        # gloo's headers and the padding between pieces; less than a hundredth of the model, which a second copy would exceed
        assert stats.num_network <= by_sockets < stats.num_network + 0.01 * of_model
        for server in servers.values():
            for number, process in enumerate(server.processes):
                assert process.call("digests") == {name: tensor_digest(source.model[name]) for name in needs_of(number, 2)}
    finally:
        source.close()
        for process in (process for server in servers.values() for process in server.processes):
            process.close()
