"""Real links between real ranks: what is measured, and that a rank that answers late is the one that is named."""

import pytest
from node_cases import cpu_node
from slow_ranks import NUM_BYTES, SLOW_SECONDS, measured

from moerl.doctor.checks.bandwidth_checks import bandwidth_checks, combine
from moerl.doctor.checks.expected import Expectations


@pytest.fixture(scope="module")
def three_nodes():
    """Of one rank each, of which the second answers late."""
    return combine(measured([[0], [1], [2]], slow={1})[0], on_gpus=False)


def test_every_pair_is_measured_once(three_nodes):
    assert set(three_nodes.between_nodes) == {(0, 1), (0, 2), (1, 2)}
    assert three_nodes.inside == [{}, {}, {}]
    assert three_nodes.all_reduce > 0


def test_links_of_a_late_rank_carry_what_its_lateness_allows(three_nodes):
    most = NUM_BYTES / SLOW_SECONDS / 1e9
    assert three_nodes.between_nodes[0, 1] <= most
    assert three_nodes.between_nodes[1, 2] <= most


def test_the_late_rank_is_named(three_nodes):
    nodes = [cpu_node(f"n{index}") for index in range(3)]
    bad = [finding for finding in bandwidth_checks(three_nodes, nodes, Expectations()) if finding.verdict == "warn"]
    assert [(finding.node, finding.check) for finding in bad] == [("n1", "slow beside other nodes")]


def test_ranks_of_a_node_are_measured_among_themselves_and_with_their_like_elsewhere():
    by_rank, met = measured([[0, 1], [2, 3]], slow=set())
    found = combine(by_rank, on_gpus=False)
    assert set(found.between_nodes) == {(0, 1)}
    assert [set(links) for links in found.inside] == [{(0, 1)}, {(0, 1)}]
    assert len(found.node_all_reduce) == 2
    assert min(*found.node_all_reduce, found.all_reduce) > 0
    # In the group of all, NCCL would give a pair of a node no more channels than a pair of two nodes.
    assert met[0] == {1: [0, 1], 2: [0, 1, 2, 3]}
    assert met[3] == {2: [2, 3], 1: [0, 1, 2, 3]}
