"""The order of nodes: by name, or by the switches of a topology.conf."""

import pytest

from moerl.cluster.topology import by_name, by_topology, expand
from moerl.types import ConfigError

TREE = """
# two racks of three
SwitchName=leaf1 Nodes=gpu[01,04],big7
SwitchName=leaf0 Nodes=gpu[02-03],gpu10-ib[0-1]   # and a pair
SwitchName=spine Switches=leaf[0-1]
"""


def test_numbers_in_names_count_as_numbers():
    assert by_name(["n10", "n9", "a2", "n1-b10", "n1-b2"]) == ["a2", "n1-b2", "n1-b10", "n9", "n10"]


def test_lists_of_hosts_are_written_out():
    assert expand("gpu[01-03,7],login,r[0-1]n[08-09]") == ["gpu01", "gpu02", "gpu03", "gpu7", "login", "r0n08", "r0n09", "r1n08", "r1n09"]


def test_nodes_below_one_switch_follow_each_other_in_the_order_of_the_tree():
    names = ["big7", "gpu01", "gpu02", "gpu03", "gpu04", "gpu10-ib1"]
    assert by_topology(names, TREE, path="topology.conf") == ["gpu02", "gpu03", "gpu10-ib1", "gpu01", "gpu04", "big7"]


def test_a_node_that_the_file_lacks_is_named():
    with pytest.raises(ConfigError, match=r"placement.topology = 'topology.conf': must name every node.*\n.*gpu05, gpu11"):
        by_topology(["gpu11", "gpu01", "gpu05"], TREE, path="topology.conf")
