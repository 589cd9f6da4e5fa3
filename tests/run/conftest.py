"""Whole runs as a user starts them: `moerl train` in a process of its own, on a small model. Lets tests import `whole_runs`."""

import asyncio
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).parent))

from whole_runs import left_in_shared_memory, shared_memory

from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.train.group import MegatronTrainGroup
from moerl.train.push.push_source import MegatronSource

_IN_FLIGHT_SECONDS = 0.3
"""For buckets to fill the senders' buffers, while a server that is stopped reads none."""


@dataclass(frozen=True, kw_only=True)
class Struck:
    pools: list[RolloutPool] = field(default_factory=list)
    family: list[psutil.Process] = field(default_factory=list)
    """Server 0's process and all below it, when it got the signal."""


@pytest.fixture
def nothing_left():
    """Of a run inside this process, also of one that fails."""
    children, shared = set(psutil.Process().children(recursive=True)), shared_memory()
    yield
    _, alive = psutil.wait_procs([p for p in psutil.Process().children(recursive=True) if p not in children], timeout=30)
    assert [" ".join(process.cmdline()) for process in alive] == []
    assert left_in_shared_memory(shared) == set()


@pytest.fixture(scope="module")
def raylets():
    """Processes of the two nodes, in the order of their addresses. (Ray takes 127.0.0.1 for the address of this host.)"""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_ip_address": "127.0.0.2", "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2, node_ip_address="127.0.0.3")
        cluster.wait_for_nodes()
        nodes = [cluster.head_node, *cluster.worker_nodes]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield [psutil.Process(node.all_processes["raylet"][0].process.pid) for node in nodes]
    finally:
        cluster.shutdown()


@pytest.fixture
def strike(monkeypatch):
    """strike(when, signal): server 0 gets the signal once, at that place of the second step."""
    struck = Struck()
    start = RolloutPool.start

    async def noted(pool):
        struck.pools.append(pool)
        await start(pool)

    monkeypatch.setattr(RolloutPool, "start", noted)

    def prepare(when, number):
        calls = []

        def hit(at, *, stop_first=False):
            calls.append(at)
            if len(calls) == at:
                server = psutil.Process(struck.pools[0].fleet.members[0].engine.watched[0].process.pid)
                struck.family.extend([server, *server.children(recursive=True)])
                if stop_first:
                    server.send_signal(signal.SIGSTOP)
                    asyncio.get_running_loop().call_later(_IN_FLIGHT_SECONDS, server.send_signal, number)
                else:
                    server.send_signal(number)

        def before(owner, name, at):
            upstream = getattr(owner, name)

            async def on_the_way(*args, **kwargs):
                hit(at)
                return await upstream(*args, **kwargs)

            monkeypatch.setattr(owner, name, on_the_way)

        def in_transfer(upstream):
            async def on_the_way(source):
                hit(3, stop_first=True)  # after the first push and that of the first step
                return await upstream(source)

            monkeypatch.setattr(MegatronSource, "send", on_the_way)

        if when == "generation":
            before(RolloutPool, "_generate", 20)  # of 16 requests a step
        elif when == "idle":
            before(MegatronTrainGroup, "update", 2)
        else:
            in_transfer(MegatronSource.send)
        return struck

    return prepare
