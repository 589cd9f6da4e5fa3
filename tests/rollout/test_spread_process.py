"""The processes of one server over several nodes, with small programs in the place of an engine: they meet, serve and end together."""

import asyncio
import os
import signal
import socket
import sys
from dataclasses import replace

import psutil
import pytest

from moerl.cluster.placement import Node, ProcessPlace, RunPlacement
from moerl.cluster.run_secret import RunSecret
from moerl.cluster.sockets import free_ports
from moerl.config.load import load
from moerl.config.schema.rollout_config import ServerLayout
from moerl.rollout.build_engines import build_engines
from moerl.rollout.server.remote_process import RemoteProcess
from moerl.rollout.server.server_process import ServerProcess
from moerl.rollout.server.spread_process import NodeOfServer, SpreadProcess
from moerl.types.errors import EngineError, EngineUnavailable

ARRIVE = "import sys, time; print('{\"arrived\": true}', flush=True); "
SERVE = ARRIVE + "print('{\"port\": 7}', flush=True); "
STAY = "time.sleep(60)"


def spread(tmp_path, *codes, start_seconds=20.0, port=0):
    """A server whose nodes run `codes`."""
    nodes = [NodeOfServer(host=f"host-{rank}", command=[sys.executable, "-c", code]) for rank, code in enumerate(codes)]
    return SpreadProcess(
        nodes, secret=RunSecret.new(), label="server", log_path=tmp_path / "log.txt", start_seconds=start_seconds, port=port
    )


def pids(process):
    return [each.process.pid for each in process.watched]


def assert_gone(found):
    assert not any(map(psutil.pid_exists, found))


@pytest.mark.parametrize("struck", [0, 1, 2])
def test_whichever_process_is_killed_the_server_has_ended_and_the_report_names_its_node_and_log(run, tmp_path, struck):
    process = spread(tmp_path, SERVE + STAY, ARRIVE + STAY, ARRIVE + STAY)

    async def scenario():
        assert await process.start() == 7
        process.label = "host-0:7"
        found = pids(process)
        os.kill(found[struck], signal.SIGKILL)
        death = await process.death()
        await process.close()
        assert_gone(found)
        return death

    death = run(scenario())
    name = "log.txt" if struck == 0 else f"log-node{struck}.txt"
    assert isinstance(death, EngineUnavailable)
    assert f"host-0:7: the process on node {struck} of its 3 nodes (host-{struck}) ended first" in str(death)
    assert "signal 9" in str(death) and death.origin.log == str(tmp_path / name)
    others = str(death).rpartition("the others: ")[2]
    assert [f"node {rank} " in others for rank in range(3)] == [rank != struck for rank in range(3)]


def test_who_waits_for_the_end_of_a_server_that_is_closed_hears_of_it(run, tmp_path):
    """As every request does that is in flight when a server hangs and is closed."""
    process = spread(tmp_path, SERVE + STAY, ARRIVE + STAY)

    async def scenario():
        await process.start()
        deaths = [asyncio.create_task(process.death()) for _ in range(2)]
        await asyncio.sleep(0)
        await process.close()
        return [str(death) for death in await asyncio.gather(*deaths, return_exceptions=True)]

    assert run(scenario()) == ["server: the server was closed"] * 2


def test_it_starts_again_whole_after_a_loss_and_meets_at_the_same_new_port_everywhere(run, tmp_path):
    ports = "import sys; print(sys.argv[2], file=sys.stderr, flush=True); "
    process = spread(tmp_path, ports + SERVE + STAY, ports + ARRIVE + STAY)

    async def scenario():
        found = []
        for _ in range(2):
            await process.start()
            found += pids(process)
            process.kill()
            await process.death()
            await process.close()
        assert len(set(found)) == 4
        assert_gone(found)

    run(scenario())
    met = [(tmp_path / name).read_text().split() for name in ("log.txt", "log-node1.txt")]
    assert met[0] == met[1] and len(met[0]) == 2 and all(1024 < int(port) < 32768 for port in met[0])


def test_a_port_that_is_given_is_where_the_nodes_meet(run, tmp_path):
    process = spread(tmp_path, ARRIVE + "print('{\"port\": %s}' % sys.argv[2], flush=True); " + STAY, ARRIVE + STAY, port=26000)

    async def scenario():
        assert await process.start() == 26000
        await process.close()

    run(scenario())


def test_a_process_that_ends_while_the_others_load_ends_the_start(run, tmp_path):
    process = spread(tmp_path, ARRIVE + STAY, ARRIVE + "sys.exit('out of memory')")
    with pytest.raises(EngineError, match=r"(?s)node 1 of its 2 nodes \(host-1\) ended first.*exit code 1.*out of memory"):
        run(process.start())
    assert process.watched[0].process is None and process.watched[1].process is None


def test_a_process_that_dies_before_it_arrives_ends_the_start_while_another_never_arrives(run, tmp_path):
    process = spread(tmp_path, "import time; " + STAY, "import sys; sys.exit('no such module')")
    with pytest.raises(EngineError, match=r"(?s)node 1 .*exit code 1.*no such module"):
        run(process.start())


def test_what_a_node_refuses_is_the_error(run, tmp_path):
    process = spread(tmp_path, ARRIVE + STAY, 'import time; print(\'{"error": "engine_args.x is unknown"}\', flush=True); ' + STAY)
    with pytest.raises(EngineError, match=r"node 1 .*engine_args.x is unknown"):
        run(process.start())


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        (
            (ARRIVE + STAY, "import time; " + STAY, ARRIVE + STAY),
            r"of its 3 nodes these did not arrive: node 1 \(host-1\), log .*log-node1.txt$",
        ),
        ((ARRIVE + STAY, ARRIVE + STAY), r"all its nodes arrived, and loading may be slow"),
    ],
)
def test_at_the_deadline_the_nodes_that_did_not_arrive_are_named(run, tmp_path, codes, said):
    process = spread(tmp_path, *codes, start_seconds=2)
    with pytest.raises(EngineError, match=rf"not ready after deadlines.start_seconds = 2; {said}"):
        run(process.start())

    async def death():
        return await process.death()

    assert "not ready after" in str(run(death())), "whoever watches a server that could not start hears why"
    assert [each.process for each in process.watched] == [None] * len(codes)


def test_a_start_that_is_cancelled_leaves_no_process(run, tmp_path):
    process = spread(tmp_path, ARRIVE + STAY, ARRIVE + STAY)

    async def scenario():
        start = asyncio.create_task(process.start())
        while not all(each.process for each in process.watched):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        found = pids(process)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        assert_gone(found)

    run(scenario())


def test_ports_that_somebody_listens_on_are_not_chosen():
    first = free_ports(3)
    with socket.create_server(("", first + 1)):
        chosen = [free_ports(2) for _ in range(20)]
    assert not {first, first + 1} & set(chosen)


def test_a_server_of_two_places_has_a_process_on_both_nodes_which_meet_on_the_first(tmp_path):
    config = load(["recipe=grpo-tiny-moe-1n2g-sync"])
    rollout = replace(config.rollout, engine="sglang", python=sys.executable, layout=ServerLayout(gpus=4, gpus_per_node=2))
    config = replace(config, rollout=rollout, placement=replace(config.placement, nodes=2, gpus_per_node=2))
    nodes = [Node(id=name, name=name, address=f"10.0.0.{number}", num_gpus=2, num_cpus=2) for number, name in enumerate("ab")]
    places = tuple(ProcessPlace(node=node, gpus=("4", "5")) for node in nodes)
    (engine,) = build_engines(config, tmp_path, tmp_path, RunSecret.new(), RunPlacement(ranks=(), servers=(places,), here="a"))
    assert engine.hosts == ("10.0.0.0", "10.0.0.1")
    assert [each.name for each in engine.watched] == ["server 10.0.0.0:0", "server 10.0.0.0:0 node 1"]
    near, far = engine._process._processes
    assert isinstance(near, ServerProcess) and isinstance(far, RemoteProcess)
    for rank, process in enumerate((near, far)):
        line = " ".join(process._command)
        assert f"--host 10.0.0.{rank} " in line and f"--node-rank {rank} --head 10.0.0.0" in line
    assert near._environment == far._settings["environment"] == {"CUDA_VISIBLE_DEVICES": "4,5"}
