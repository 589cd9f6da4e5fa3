"""Which card of its node each GPU's bytes take, and the rails of a run's processes that follow."""

import asyncio
from dataclasses import replace

import pytest
from node_cases import h100_node, output

from moerl.cluster.placement import ProcessPlace, RunPlacement
from moerl.cluster.ray_nodes import Node
from moerl.hardware.hardware_tools import Absent
from moerl.hardware.infiniband import Port
from moerl.hardware.nvidia import Topology, parse_topology
from moerl.hardware.rails import cards, find_rails, rails_of
from moerl.weights import process_rails
from moerl.weights.process_rails import ProcessRails, combined

H100 = {str(gpu): gpu for gpu in range(8)}


def node_of(distances, adapters):
    """Topology of GPUs, each with its distances to the adapters, and their ports."""
    gpus = [f"GPU{gpu}" for gpu in range(len(distances))]
    between = {
        gpu: dict.fromkeys(gpus, "NV18") | {gpu: "X"} | dict(zip(adapters, kinds, strict=True))
        for gpu, kinds in zip(gpus, distances, strict=True)
    }
    ports = tuple(Port(adapter=name, number=1, state="ACTIVE", link_layer="InfiniBand", gbit=400.0) for name in adapters)
    return Topology(between=between), ports


def test_each_gpu_of_an_h100_node_has_the_card_beside_it_and_storage_cards_are_none():
    facts = h100_node()
    assert cards(facts.ports, facts.topology) == [f"mlx5_{index}" for index in (0, 1, 2, 3, 5, 6, 7, 8)]
    assert rails_of(facts.topology, facts.ports) == H100


def test_rails_are_found_by_the_tools_of_the_node(h100_node):
    assert find_rails() == H100


def test_cards_are_numbered_by_their_names_numbers():
    topology, ports = node_of([["PIX"] * 3], ["mlx5_10", "mlx5_2", "mlx5_0"])
    assert cards(ports, topology) == ["mlx5_0", "mlx5_2", "mlx5_10"]


def test_gpus_that_share_a_card_are_on_its_rail():
    near, far = "PXB", "SYS"
    topology, ports = node_of([[near, far]] * 2 + [[far, near]] * 2, ["mlx5_0", "mlx5_1"])
    assert rails_of(topology, ports) == {"0": 0, "1": 0, "2": 1, "3": 1}


def test_cards_as_near_as_each_other_are_taken_in_nccl_s_mirrored_order():
    names = [f"mlx5_{index}" for index in range(4)]
    assert rails_of(*node_of([["PHB"] * 4] * 4, names)) == {"0": 0, "1": 2, "2": 1, "3": 3}
    assert rails_of(*node_of([["PHB"] * 3] * 4, names[:3])) == {"0": 0, "1": 1, "2": 2, "3": 0}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(topology=Absent(reason="nvidia-smi is not on PATH")), "nvidia-smi is not on PATH"),
        (dict(ports=Absent(reason="ibv_devinfo is not on PATH")), "ibv_devinfo is not on PATH"),
        (dict(ports=()), "no active InfiniBand port"),
        (dict(topology=parse_topology(output("pcie_topo.txt"))), "tells no distance between GPU0 and a card"),
    ],
)
def test_without_what_tells_them_there_are_no_rails_and_the_reason_is_said(changes, why):
    facts = replace(h100_node(), **changes)
    found = rails_of(facts.topology, facts.ports)
    assert isinstance(found, Absent) and why in found.reason


def placed(*gpus_of_servers):
    """Ranks on the GPUs 0 and 1 of node a, servers on some of node b."""
    a, b = (Node(id=name, name=name, address=name, num_gpus=8, num_cpus=8) for name in "ab")
    ranks = tuple(ProcessPlace(node=a, gpus=(gpu,)) for gpu in "01")
    servers = tuple((ProcessPlace(node=b, gpus=tuple(gpus)),) for gpus in gpus_of_servers)
    return RunPlacement(ranks=ranks, servers=servers, here="a")


def test_processes_of_a_run_have_the_rails_of_their_gpus():
    found = {"a": {"0": 0, "1": 1}, "b": {str(gpu): gpu // 4 for gpu in range(8)}}
    assert combined(placed("01", "67"), found) == ProcessRails(ranks=(0, 1), servers=((0, 0), (1, 1)))


def test_nodes_with_other_numbers_of_rails_have_none_in_common():
    assert "nodes have 2 to 8 of them" in combined(placed("0"), {"a": {"0": 0, "1": 1}, "b": H100})
    assert "GPU '9'" in combined(placed("9"), {"a": H100, "b": H100})


@pytest.mark.parametrize("gone", [False, True])
def test_every_node_of_a_run_is_asked_and_one_that_does_not_answer_leaves_none(h100_node, monkeypatch, gone):
    asked = []

    async def here(node_id, function, *, seconds):
        asked.append(node_id)
        if gone and node_id == "b":
            raise TimeoutError
        return function()

    monkeypatch.setattr(process_rails, "on_node", here)
    found = asyncio.run(process_rails.find_process_rails(placed("01", "67"), seconds=1.0))
    assert found == (None if gone else ProcessRails(ranks=(0, 1), servers=((0, 1), (6, 7)))) and asked == ["a", "b"]


def test_a_run_on_one_node_or_without_gpus_asks_nobody():
    on_cpu = replace(placed("0"), servers=((replace(placed("0").ranks[0], gpus=()),),))
    for placement in (replace(placed("0"), servers=()), on_cpu):
        assert asyncio.run(process_rails.find_process_rails(placement, seconds=1.0)) is None
