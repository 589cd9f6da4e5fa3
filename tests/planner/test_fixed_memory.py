"""Figures that the planner has from elsewhere are those of the code they come from."""

from moerl.config.schema.layout import Layout
from moerl.planner import fixed_memory as fixed
from moerl.weights.installation import DEVICE_BYTES
from moerl.weights.transport.shared_memory import NUM_BUFFERS


def test_buffers_of_a_push_are_those_that_ranks_and_servers_have():
    assert (fixed.PUSH_BUFFERS, fixed.RELAY_BUFFERS, fixed.RECEIVED) == (NUM_BUFFERS, NUM_BUFFERS, DEVICE_BYTES)


def test_one_rank_has_no_communicators_and_dense_data_parallel_ones_few():
    """Two ranks: all of them, data parallel with and without context."""
    assert fixed.communicator_bytes(Layout(), 8, has_shared_embedding=True) == 0
    assert fixed.communicator_bytes(Layout(ranks=2), 8, has_shared_embedding=True) == 3 * fixed.COMMUNICATOR[False]


def test_communicators_of_a_large_layout_are_what_is_reported():
    """7 to 10 GB idle on a rank of Megatron's with experts on nodes of 8 H100 (github.com/verl-project/verl/issues/6266)."""
    large = Layout(ranks=256, tp=2, pp=16, ep=16, first_stage_layers=3, last_stage_layers=2)
    assert 7e9 < fixed.communicator_bytes(large, 8, has_shared_embedding=True) < 1e10
    alone = Layout(ranks=8, ep=8)
    peers = 7 * fixed.ALL_TO_ALL_PEER
    assert peers < fixed.communicator_bytes(alone, 8, has_shared_embedding=False) < peers + 6 * fixed.COMMUNICATOR[True]


def test_muon_connects_each_rank_to_those_that_it_exchanges_matrices_with():
    """8 of data parallelism on a node, and of experts, whose ranks are on other nodes."""
    layout = Layout(ranks=16, ep=8)
    more = fixed.communicator_bytes(layout, 8, has_shared_embedding=False, has_muon=True)
    more -= fixed.communicator_bytes(layout, 8, has_shared_embedding=False)
    assert more == 7 * fixed.ALL_TO_ALL_PEER + 2 * fixed.ALL_TO_ALL_NETWORK
