"""The order of nodes: by name, or by the switches of a topology.conf."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.cluster.topology import by_name, by_topology, expand
from moerl.types.errors import ConfigError

TREE = """
# two racks of three
SwitchName=leaf1 Nodes=gpu[01,04],big7
SwitchName=leaf0 Nodes=gpu[02-03],gpu10-ib[0-1]   # and a pair
SwitchName=spine Switches=leaf[0-1]
"""


def test_numbers_in_names_count_as_numbers():
    assert by_name(["n10", "n9", "a2", "n1-b10", "n1-b2"]) == ["a2", "n1-b2", "n1-b10", "n9", "n10"]


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("n0", ["n0"]),
        ("n[0-1]", ["n0", "n1"]),
        ("a,b[08-10,12],c", ["a", "b08", "b09", "b10", "b12", "c"]),
        ("r[1-2]n[3,5]-ib", ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib"]),
        ("gpu[01-03,7],login,r[0-1]n[08-09]", ["gpu01", "gpu02", "gpu03", "gpu7", "login", "r0n08", "r0n09", "r1n08", "r1n09"]),
    ],
)
def test_slurms_short_form_is_expanded(short: str, names: list[str]):
    assert expand(short) == names


@given(st.lists(st.integers(0, 9999), min_size=1, unique=True).map(sorted))
def test_any_list_of_numbers_is_expanded_in_order(numbers: list[int]):
    assert expand(f"node[{','.join(f'{number:04d}' for number in numbers)}]") == [f"node{number:04d}" for number in numbers]


def test_nodes_below_one_switch_follow_each_other_in_the_order_of_the_tree():
    names = ["big7", "gpu01", "gpu02", "gpu03", "gpu04", "gpu10-ib1"]
    assert by_topology(names, TREE, path="topology.conf") == ["gpu02", "gpu03", "gpu10-ib1", "gpu01", "gpu04", "big7"]


def test_a_node_that_the_file_lacks_is_named():
    with pytest.raises(ConfigError, match=r"placement.topology = 'topology.conf': must name every node.*\n.*gpu05, gpu11"):
        by_topology(["gpu11", "gpu01", "gpu05"], TREE, path="topology.conf")


BLOCKS = """
BlockName=rack1 Nodes=gpu[05-08]
BlockName=rack0 Nodes=gpu[01-04]
BlockSizes=4,8
"""


def test_nodes_of_one_block_follow_each_other():
    assert by_topology(["gpu04", "gpu08", "gpu01", "gpu05"], BLOCKS, path="x") == ["gpu05", "gpu08", "gpu01", "gpu04"]


def test_a_name_with_its_domain_is_found_by_its_first_part_unless_the_file_has_it_whole():
    names = ["gpu04.cluster.local", "gpu02.cluster.local", "gpu01.cluster.local"]
    assert by_topology(names, TREE, path="x") == ["gpu02.cluster.local", "gpu01.cluster.local", "gpu04.cluster.local"]
    whole = "SwitchName=a Nodes=n1.b,n1\nSwitchName=b Nodes=n1.a\n"
    assert by_topology(["n1.a", "n1.b"], whole, path="x") == ["n1.b", "n1.a"]


@pytest.mark.parametrize("text", ["Nodes=gpu01", "BlockName=rack0", "SwitchName=leaf0", "BlockSizes=4"])
def test_a_line_that_places_no_node_names_the_nodes_that_it_leaves_out(text):
    with pytest.raises(ConfigError, match="the place of gpu01 in the network is not known"):
        by_topology(["gpu01"], text, path="x")


def test_lines_are_continued_quoted_and_spaced_as_slurm_allows():
    text = 'SwitchName=l0 \\\n  Nodes="n[0,2]"\nSwitchName = l1 Nodes = n1,\\  # so far\nn3\nSwitchName=s \\\n Switches=l1,l0\n'
    assert by_topology(["n0", "n1", "n2", "n3"], text, path="t") == ["n1", "n3", "n0", "n2"]
