"""The head with real nodes: two of them on this machine, each a thread that does what a node's process does."""

import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import psutil
from torch.distributed import DistStoreError

from moerl.cluster.run_secret import RunSecret
from moerl.cluster.secret_store import SecretStore
from moerl.config.schema.run_config import NetworkConfig
from moerl.doctor.checks.expected import Expectations
from moerl.doctor.head import diagnose
from moerl.doctor.on_each_node import NodePlace, examine
from moerl.doctor.reach_nodes import Launched

SECONDS = 90.0


@contextmanager
def nodes(present, *, expected, num=2, dead=None, seconds=SECONDS):
    """What was launched: `present` of `num` nodes do their part."""
    store = SecretStore.open("127.0.0.1", RunSecret.new(), seconds)
    names = tuple(f"n{index}" for index in range(num))
    met = {"host": store.host, "port": store.port, "secret": store.secret.key, "num_nodes": num, "expected": expected}
    places = [NodePlace(index=index, name=names[index], seconds=SECONDS, **met) for index in present]
    threads = [threading.Thread(target=_until_the_head_ends, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    try:
        yield Launched(store=store, names=names, dead=lambda: {} if dead is None else dead)
    finally:
        store.set("stop", "")
        store.set("plan", store.get("plan") if store.check(["plan"]) else "")
        for thread in threads:
            thread.join(SECONDS)
        store.close()


def _until_the_head_ends(place):
    try:
        examine(place)
    except DistStoreError:
        return


def examined(present=(0, 1), *, measures=False, seconds=SECONDS, network=None, **more):
    expected = Expectations(run_dir=Path.cwd(), network=NetworkConfig() if network is None else network)
    with nodes(present, expected=expected, seconds=seconds, **more) as launched:
        return diagnose(launched, expected, seconds=seconds, measures=measures)


def of(diagnosis, check):
    return {finding.node: finding for finding in diagnosis.findings if finding.check == check}


def test_two_nodes_are_looked_at_reached_and_measured():
    diagnosis = examined(measures=True)
    assert diagnosis.is_healthy, [finding for finding in diagnosis.findings if finding.verdict == "fail"]
    assert [node.name for node in diagnosis.nodes] == ["n0", "n1"]
    assert of(diagnosis, "nodes")["all"].found == "2"
    assert {node: finding.verdict for node, finding in of(diagnosis, "clock").items()} == {"n0": "ok", "n1": "ok"}
    assert {node: finding.found for node, finding in of(diagnosis, "reached by name").items()} == {"n0": "from n1", "n1": "from n0"}
    assert diagnosis.bandwidth is not None
    assert set(diagnosis.bandwidth.between_nodes) == {(0, 1)}
    assert min(diagnosis.bandwidth.between_nodes[0, 1], diagnosis.bandwidth.all_reduce) > 0


def test_a_node_that_is_silent_is_named_when_time_is_up_and_the_others_are_looked_at():
    diagnosis = examined((1,), seconds=10.0, measures=True)
    assert of(diagnosis, "node")["n0"].found == "did not answer within 10 s"
    assert [node.name for node in diagnosis.nodes] == ["n1"]
    assert of(diagnosis, "bandwidth")["all"].found == "not every node answered"
    assert not diagnosis.is_healthy


def test_a_node_that_died_is_not_waited_for():
    diagnosis = examined((0,), dead={1: "ModuleNotFoundError: No module named 'moerl'"})
    assert of(diagnosis, "node")["n1"].found == "ModuleNotFoundError: No module named 'moerl'"


def test_a_node_with_fewer_infiniband_ports_than_the_other_is_named(fake_tools, tmp_path):
    fake_tools(ibv_devinfo=f"if mkdir {tmp_path}/asked; then cat ibv_devinfo.txt; else cat ibv_devinfo_down.txt; fi")
    (finding,) = of(examined(), "InfiniBand beside other nodes").values()
    assert (finding.verdict, finding.found.partition(";")[0]) == ("fail", "1 active at 400 Gb/s")


def test_a_setting_that_a_node_cannot_have_is_its_fault_by_name():
    diagnosis = examined(network=NetworkConfig(interface="nope0"))
    assert "network.interface = 'nope0'" in of(diagnosis, "node")["n1"].found


def test_a_rank_that_fails_is_named_with_its_last_words_and_leaves_no_process():
    before = set(psutil.Process().children(recursive=True))
    diagnosis = examined(measures=True, network=NetworkConfig(variables={"GLOO_SOCKET_IFNAME": "nope0"}))
    failures = [finding for finding in diagnosis.findings if finding.check.startswith("bandwidth, rank")]
    assert {finding.node for finding in failures} == {"n0", "n1"}
    assert all("nope0" in finding.found for finding in failures)
    assert not [process for process in set(psutil.Process().children(recursive=True)) - before if process.is_running()]


def test_a_host_name_that_nobody_resolves_is_found_by_trying_it(monkeypatch):
    monkeypatch.setattr("moerl.doctor.checks.node_facts.socket", _Named("no host"))
    diagnosis = examined()
    assert {node: finding.verdict for node, finding in of(diagnosis, "own name").items()} == {"n0": "fail", "n1": "fail"}
    assert all("not from n" in finding.found for finding in of(diagnosis, "reached by name").values())


class _Named:
    """socket, for a host of that name."""

    def __init__(self, name):
        self.gethostname = lambda: name

    def __getattr__(self, name):
        return getattr(socket, name)
