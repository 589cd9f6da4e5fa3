"""Nodes beside each other: who is missing, who differs, whose clock is off, whom nobody reaches."""

from dataclasses import replace

import pytest
from node_cases import cpu_node, h100_node

from moerl.doctor.checks.cluster_checks import Skew, clock_checks, count_checks, likeness_checks, reach_checks
from moerl.doctor.checks.expected import Expectations
from moerl.hardware.network_settings import Setting
from moerl.hardware.nvidia import parse_gpus

NODES = [h100_node(f"n{index}") for index in range(4)]


def failed(findings):
    return [(finding.node, finding.check) for finding in findings if finding.verdict == "fail"]


def test_a_missing_node_is_named_with_why_and_counted():
    findings = list(count_checks(NODES[:3], {"n3": "did not answer within 60 s"}, Expectations(nodes=4)))
    assert failed(findings) == [("n3", "node"), ("all", "nodes")]
    assert findings[0].found == "did not answer within 60 s"
    assert findings[1].found == "3 of 4"


def test_too_few_gpus_for_the_run_says_both_numbers():
    findings = list(count_checks(NODES[:3], {}, Expectations(ranks=32, gpus_per_node=8)))
    assert failed(findings) == [("all", "GPUs of all nodes")]
    assert (findings[-1].found, findings[-1].expected) == ("24", "32 train ranks")
    assert not failed(count_checks(NODES, {}, Expectations(ranks=32)))


def test_servers_with_gpus_of_their_own_count_too():
    findings = list(count_checks(NODES, {}, Expectations(nodes=4, ranks=24, server_gpus=16, gpus_per_node=8)))
    assert failed(findings) == [("all", "GPUs of all nodes")]
    assert (findings[-1].found, findings[-1].expected) == ("32", "24 train ranks and 16 GPUs of servers")


def test_a_run_without_gpus_needs_none():
    assert [finding.check for finding in count_checks([cpu_node()], {}, Expectations(ranks=2))] == ["nodes"]


def test_nodes_that_are_alike_are_said_to_be():
    assert [finding.verdict for finding in likeness_checks(NODES)] == ["ok"]
    assert list(likeness_checks(NODES[:1])) == []


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("same GPUs", lambda node: replace(node, gpus=node.gpus[:7])),
        ("same driver", lambda node: replace(node, gpus=tuple(replace(gpu, driver="535.1") for gpu in node.gpus))),
        ("same torch", lambda node: replace(node, versions=node.versions | {"torch": "2.12.0"})),
        ("same network settings", lambda node: replace(node, settings=(Setting(name="NCCL_IB_TIMEOUT", value="22", reason="x"),))),
    ],
)
def test_the_node_that_differs_is_named(what, change):
    findings = list(likeness_checks([NODES[0], NODES[1], change(NODES[2]), NODES[3]]))
    assert failed(findings) == [("n2", what)]
    assert findings[0].expected.endswith("as on n0")


def test_adapters_and_interfaces_may_differ_from_node_to_node():
    own = [replace(node, settings=(Setting(name="NCCL_IB_HCA", value=f"=mlx5_{index}", reason="x"),)) for index, node in enumerate(NODES)]
    assert not failed(likeness_checks(own))


@pytest.mark.parametrize(
    ("skew", "verdict"),
    [
        (Skew(seconds=-0.05, error_seconds=0.001), "ok"),
        (Skew(seconds=0.3, error_seconds=0.25), "ok"),  # a slow answer says little of the clock
        (Skew(seconds=-0.3, error_seconds=0.001), "warn"),
        (Skew(seconds=61.0, error_seconds=0.001), "fail"),
    ],
)
def test_a_clock_is_off_by_more_than_its_measurement(skew, verdict):
    (finding,) = clock_checks({"n1": skew})
    assert (finding.node, finding.verdict) == ("n1", verdict)


def test_a_name_that_others_do_not_reach_fails():
    findings = list(reach_checks(NODES[:2], {"n0": ("n1", ""), "n1": ("n0", "n1: Connection refused")}))
    assert failed(findings) == [("n1", "reached by name")]
    assert "not from n0: n1: Connection refused" in findings[1].found


def test_a_node_that_takes_its_own_name_for_loopback_fails_although_others_reach_it():
    """Debian's 127.0.1.1: other nodes know its address, but its own ranks would listen where nobody else is."""
    wrong = replace(NODES[1], own_addresses=("127.0.1.1",))
    assert failed(reach_checks([NODES[0], wrong], {"n0": ("n1", ""), "n1": ("n0", "")})) == [("n1", "reached by name")]


def test_a_name_that_nobody_reaches_is_a_warning_where_gloo_is_told_an_interface():
    told = replace(NODES[1], gloo_interface="bond0")
    findings = list(reach_checks([NODES[0], told], {"n0": ("n1", ""), "n1": ("n0", "n1: timed out")}))
    assert (findings[1].verdict, findings[1].found) == ("warn", "not from n0: n1: timed out; gloo uses bond0")


def test_nodes_on_one_machine_may_share_loopback():
    both = [cpu_node(name, own_addresses=("127.0.0.1",), boot_id="one") for name in ("n0", "n1")]
    assert not failed(reach_checks(both, {"n0": ("n1", ""), "n1": ("n0", "")}))


def test_a_single_node_need_not_be_reached():
    assert [finding.verdict for finding in reach_checks([cpu_node()], {})] == ["skipped"]


def test_mixed_models_are_one_kind_of_difference():
    other = parse_gpus("0, NVIDIA GeForce RTX 4090, 550.54.15, 8.9, 24564, 411, 44, 210, 3105, [N/A], [N/A], [N/A], 0x1\n")
    assert failed(likeness_checks([*NODES[:3], replace(NODES[3], gpus=other)])) == [("n3", "same GPUs")]
