"""InfiniBand ports of one node beside those of the others."""

from dataclasses import replace

import pytest
from node_cases import h100_node

from moerl.doctor.checks.cluster_checks import fabric_checks
from moerl.doctor.checks.host_checks import host_checks
from moerl.hardware.hardware_tools import Absent
from moerl.hardware.infiniband import Port


def port(adapter, gbit=400.0, state="ACTIVE", number=1):
    return Port(adapter=adapter, number=number, state=state, link_layer="InfiniBand", gbit=gbit)


HEALTHY = (*(port(f"mlx5_{index}") for index in range(8)), port("mlx5_8", 100.0))


def beside(ports, *, others=HEALTHY, num=4):
    """What is said of n2, which has `ports`."""
    return list(fabric_checks([h100_node(f"n{index}", ports=ports if index == 2 else others) for index in range(num)]))


def without(index):
    return HEALTHY[:index] + HEALTHY[index + 1 :]


def with_one(index, **changes):
    return (*HEALTHY[:index], replace(HEALTHY[index], **changes), *HEALTHY[index + 1 :])


@pytest.mark.parametrize(
    ("ports", "found"),
    [
        (with_one(7, gbit=200.0), "7 active at 400 Gb/s, 1 active at 200 Gb/s, 1 active at 100 Gb/s; missing or slower: mlx5_7:1"),
        (without(7), "7 active at 400 Gb/s, 1 active at 100 Gb/s; missing or slower: mlx5_7:1"),
        (with_one(3, state="DOWN", gbit=10.0), "7 active at 400 Gb/s, 1 active at 100 Gb/s; missing or slower: mlx5_3:1"),
        (without(8), "8 active at 400 Gb/s; missing or slower: mlx5_8:1"),
        ((), "no active port; missing or slower: " + ", ".join(f"mlx5_{index}:1" for index in range(9))),
    ],
)
def test_a_node_with_a_slow_or_missing_port_is_named_with_it(ports, found):
    (finding,) = beside(ports)
    assert (finding.node, finding.verdict, finding.found) == ("n2", "fail", found)
    assert finding.expected == "8 active at 400 Gb/s, 1 active at 100 Gb/s, as most nodes have"
    assert "--exclude=n2" in finding.fix


def test_of_two_nodes_the_better_one_is_the_measure():
    (finding,) = fabric_checks([h100_node("n0", ports=without(0)), h100_node("n1", ports=HEALTHY)])
    assert (finding.node, finding.verdict) == ("n0", "fail")


def test_a_port_that_is_down_on_all_nodes_alike_is_a_warning_of_each_and_no_failure():
    cabled_once = (*HEALTHY, port("mlx5_8", None, "DOWN", 2))
    assert [finding.verdict for finding in beside(cabled_once, others=cabled_once)] == ["ok"]
    (own,) = [finding for finding in host_checks(h100_node(ports=cabled_once)) if finding.check == "InfiniBand"]
    assert (own.verdict, "not active: mlx5_8:2" in own.found) == ("warn", True)


def test_ports_may_have_other_names_and_one_node_may_have_more():
    assert [finding.verdict for finding in beside(tuple(replace(port, adapter=f"{port.adapter}_x") for port in HEALTHY))] == ["ok"]
    assert [finding.verdict for finding in beside((*HEALTHY, port("mlx5_9")))] == ["ok"]


def test_where_a_rate_is_not_known_ports_are_counted():
    unknown = with_one(0, gbit=None)
    assert [finding.verdict for finding in beside(unknown)] == ["ok"]
    (finding,) = beside(unknown[:7])
    assert (finding.found, finding.verdict) == ("7 active; missing or slower: mlx5_7:1, mlx5_8:1", "fail")


def test_a_node_whose_tool_failed_and_nodes_without_infiniband_are_not_compared():
    assert [finding.node for finding in beside(Absent(reason="ibv_devinfo ended with code 1", is_fault=True))] == ["all"]
    assert beside((), others=()) == []
    assert beside(Absent(reason="ibv_devinfo is not on PATH"), others=Absent(reason="ibv_devinfo is not on PATH")) == []
    (finding,) = beside(Absent(reason="ibv_devinfo is not on PATH"))
    assert (finding.node, finding.verdict) == ("n2", "fail")
