"""Measured bandwidths as a verdict: beside the other nodes, and beside what the links found on them can carry."""

import itertools

from node_cases import cpu_node, h100_node

from moerl.doctor.checks.bandwidth_checks import Bandwidth, bandwidth_checks, combine
from moerl.doctor.checks.expected import Expectations
from moerl.doctor.checks.slow_nodes import Measured

NODES = [h100_node(f"n{index}") for index in range(4)]
FABRIC = 380.0
"""GB/s between two nodes of eight ports of 400 Gb/s, which are 400 together."""


def between(speed=FABRIC, **slow):
    """Links of the four nodes; n2=40.0: every link of that node."""
    links = dict.fromkeys(itertools.combinations(range(4), 2), speed)
    return {pair: next((v for name, v in slow.items() if int(name[1]) in pair), links[pair]) for pair in links}


def bandwidth(links, *, all_reduce=350.0, inside=390.0, node_all_reduce=(430.0,) * 4, on_gpus=True):
    pairs = dict.fromkeys(itertools.combinations(range(8), 2), inside)
    return Bandwidth(
        between_nodes=links, inside=[pairs] * 4, node_all_reduce=node_all_reduce, all_reduce=all_reduce, on_gpus=on_gpus
    )  # fmt: skip


def bad(findings):
    return [(finding.node, finding.check, finding.verdict) for finding in findings if finding.verdict in ("fail", "warn")]


def test_a_fast_cluster_is_ok_beside_its_links():
    findings = list(bandwidth_checks(bandwidth(between()), NODES, Expectations()))
    assert {finding.verdict for finding in findings} == {"ok"}
    expected = {finding.check: finding.expected for finding in findings}
    assert expected["bandwidth between nodes"] == "70% of 400 GB/s"
    assert expected["bandwidth inside nodes"] == "70% of 478 GB/s"  # 18 links of 26.562
    assert expected["bandwidth all-reduce"] == "70% of 400 GB/s"


def test_the_slow_node_is_named_with_its_speed():
    findings = list(bandwidth_checks(bandwidth(between(n2=40.0)), NODES, Expectations()))
    assert bad(findings) == [("n2", "slow beside other nodes", "fail")]
    assert findings[0].found == "n2: 40 GB/s"


def test_a_node_that_is_slower_but_not_much_gives_a_warning():
    assert bad(bandwidth_checks(bandwidth(between(n2=230.0)), NODES, Expectations())) == [("n2", "slow beside other nodes", "warn")]


def test_one_slow_path_is_a_pair():
    findings = list(bandwidth_checks(bandwidth(between() | {(1, 3): 100.0}), NODES, Expectations()))
    assert bad(findings) == [("all", "slow pair of nodes", "fail")]
    assert findings[0].found == "n1 - n3: 100 GB/s"


def test_a_slow_gpu_inside_a_node_is_named():
    found = bandwidth(between())
    slow = {pair: 30.0 if 5 in pair else speed for pair, speed in found.inside[1].items()}
    found = Bandwidth(
        between_nodes=found.between_nodes, inside=[found.inside[0], slow, *found.inside[2:]], node_all_reduce=found.node_all_reduce,
        all_reduce=found.all_reduce, on_gpus=True,
    )  # fmt: skip
    findings = [f for f in bandwidth_checks(found, NODES, Expectations()) if f.verdict == "fail"]
    assert [(finding.node, finding.found) for finding in findings] == [("n1", "GPU 5: 30 GB/s")]


def test_a_node_whose_own_all_reduce_lags_gives_a_warning():
    found = bandwidth(between(), node_all_reduce=(430.0, 425.0, 90.0, 431.0))
    assert ("n2", "all-reduce inside", "fail") in bad(bandwidth_checks(found, NODES, Expectations()))


def test_everything_slow_is_a_warning_by_the_rates_of_the_links():
    found = bandwidth(between(speed=24.0), all_reduce=20.0, inside=45.0)
    checks = ("bandwidth between nodes", "bandwidth inside nodes", "bandwidth all-reduce")
    assert bad(bandwidth_checks(found, NODES, Expectations())) == [("all", check, "warn") for check in checks]


def test_a_figure_that_is_given_replaces_that_of_the_links():
    assert not bad(bandwidth_checks(bandwidth(between(speed=24.0), all_reduce=20.0), NODES, Expectations(gb_per_second=25.0)))


def test_less_than_half_of_a_figure_that_is_given_fails():
    found = bandwidth(between(speed=24.0), all_reduce=20.0)
    findings = bad(bandwidth_checks(found, NODES, Expectations(gb_per_second=50.0)))
    assert findings == [("all", "bandwidth between nodes", "fail"), ("all", "bandwidth all-reduce", "warn")]


def test_without_infiniband_there_is_no_figure_and_no_pass():
    nodes = [cpu_node(f"n{index}") for index in range(4)]
    found = Bandwidth(between_nodes=between(speed=1.2), inside=[{}] * 4, node_all_reduce=(), all_reduce=0.6, on_gpus=False)
    findings = {finding.check: finding for finding in bandwidth_checks(found, nodes, Expectations())}
    assert findings["bandwidth between nodes"].verdict == findings["bandwidth all-reduce"].verdict == "skipped"
    assert findings["bandwidth between nodes"].found.startswith("1.2 GB/s (gloo, CPU); no InfiniBand link")
    assert findings["nodes beside each other"].verdict == "ok"


def test_on_cpu_cores_which_others_use_too_a_slow_node_is_only_a_warning():
    nodes = [cpu_node(f"n{index}") for index in range(4)]
    found = Bandwidth(between_nodes=between(speed=1.2, n1=0.1), inside=[{}] * 4, node_all_reduce=(), all_reduce=0.6, on_gpus=False)
    assert bad(bandwidth_checks(found, nodes, Expectations())) == [("n1", "slow beside other nodes", "warn")]


def test_ranks_of_a_node_add_up_and_the_slower_end_counts():
    def rank(local, remote, inside):
        return Measured(local=local, remote=remote, node_all_reduce=inside, all_reduce=300.0 + inside)

    measured = [
        [rank({1: 400.0}, {1: 45.0}, 10.0), rank({0: 390.0}, {1: 46.0}, 11.0)],
        [rank({1: 380.0}, {0: 44.0}, 9.0), rank({0: 385.0}, {0: 47.0}, 8.0)],
    ]
    found = combine(measured, on_gpus=True)
    assert found.between_nodes == {(0, 1): 90.0}
    assert found.inside == [{(0, 1): 390.0}, {(0, 1): 380.0}]
    assert found.node_all_reduce == [10.0, 8.0]
    assert found.all_reduce == 308.0
