"""Which rank and which server gets which GPU: everybody once, groups that talk in every layer together, neighbours near."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import megatron_patches
from moerl.config.derive.gpu_map import Machine, MappedGPU, ServerShape, gpu_map, map_gpus
from moerl.config.load import load
from moerl.config.rules.facts import facts_of
from moerl.config.rules.placement_rules import placement_problems
from moerl.config.schema.layout import Layout
from moerl.config.schema.rollout_config import RolloutConfig, ServerLayout, WeightsConfig
from moerl.config.schema.run_config import PlacementConfig
from moerl.types.errors import ConfigError

NO_SERVERS = ServerShape(num_servers=1, gpus_per_server=0, num_shared=0)


@cache
def rank_generator():
    megatron_patches.activate()  # before the import, for tests of this process that need them
    from megatron.core.parallel_state import RankGenerator

    return RankGenerator


def groups(layout, kind):
    """Megatron's own, as lists of ranks. kind: tp, cp, pp; ep, etp of the experts."""
    if kind in ("ep", "etp"):
        sizes = dict(tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1)
        return rank_generator()(**sizes, order="tp-cp-ep-dp-pp").get_ranks({"ep": "ep", "etp": "tp"}[kind])
    sizes = dict(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp)
    return rank_generator()(**sizes, order="tp-cp-ep-dp-pp").get_ranks(kind)


def nodes_of(mapped, ranks):
    return {mapped.ranks[rank].node for rank in ranks}


sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 16])


@st.composite
def layouts(draw):
    layout = Layout(ranks=1, **{name: draw(sizes) for name in ("tp", "pp", "cp", "ep", "etp")})
    stage = draw(st.integers(1, 4)) * _lcm(layout.tp * layout.cp, layout.ep * layout.etp)
    assume(stage * layout.pp <= 512)
    return replace(layout, ranks=stage * layout.pp)


def _lcm(a, b):
    return next(a * n for n in range(1, b + 1) if a * n % b == 0)


@given(layouts(), st.sampled_from([1, 2, 4, 6, 8]), st.integers(1, 4), st.integers(0, 3), st.sampled_from([1, 2, 3, 8, 16]), st.data())
def test_everybody_is_placed_once_and_whole_groups_stay_inside_nodes(layout, gpus, domain, num_servers, per_server, data):
    shared = data.draw(st.integers(0, num_servers))
    servers = ServerShape(num_servers=num_servers, gpus_per_server=per_server, num_shared=shared)
    needed = layout.ranks + (num_servers - shared) * per_server
    machine = Machine(num_nodes=-(-needed // gpus) + data.draw(st.integers(-1, 4)), gpus_per_node=gpus, nodes_per_domain=domain)
    try:
        mapped = map_gpus(layout, servers, machine)
    except ConfigError:
        return
    assert needed <= machine.num_gpus
    assert set(mapped.ranks) | {gpu for server in mapped.servers for gpu in server} <= set(machine.gpus)
    assert len(set(mapped.ranks)) == len(mapped.ranks) == layout.ranks
    assert [len(server) for server in mapped.servers] == [per_server] * num_servers
    used_by_servers = Counter(gpu for server in mapped.servers for gpu in server)
    assert set(used_by_servers.values()) <= {1}
    for number, server in enumerate(mapped.servers):
        assert set(server) <= set(mapped.ranks) if number < shared else not set(server) & set(mapped.ranks)
        assert len({gpu.node for gpu in server}) == -(-per_server // gpus)
        assert server == tuple(sorted(server))
    if gpus % layout.tp == 0:
        assert all(len(nodes_of(mapped, group)) == 1 for group in groups(layout, "tp"))


@given(layouts(), st.sampled_from([8, 16]))
def test_where_sizes_divide_a_node_expert_groups_stay_inside_it_and_stages_are_on_gpus_that_follow_each_other(layout, gpus):
    unit = _lcm(layout.tp * layout.cp, layout.ep * layout.etp)
    assume(gpus % unit == 0)
    mapped = map_gpus(layout, NO_SERVERS, Machine(num_nodes=-(-layout.ranks // gpus), gpus_per_node=gpus))
    for kind in ("tp", "cp", "ep", "etp"):
        assert all(len(nodes_of(mapped, group)) == 1 for group in groups(layout, kind)), kind
    position = {rank: gpu.node * gpus + gpu.index for rank, gpu in enumerate(mapped.ranks)}
    assert all(position[second] - position[first] == unit for group in groups(layout, "pp") for first, second in pairwise(group))


def test_a_nvlink_domain_of_several_nodes_keeps_a_group_larger_than_a_node():
    layout = Layout(ranks=144, tp=1, ep=36, pp=2)
    mapped = map_gpus(layout, NO_SERVERS, Machine(num_nodes=36, gpus_per_node=4, nodes_per_domain=18))
    assert all(len({node // 18 for node in nodes_of(mapped, group)}) == 1 for group in groups(layout, "ep"))


def test_a_group_that_does_not_divide_a_node_leaves_the_rest_of_it_empty_where_there_are_nodes_enough():
    layout = Layout(ranks=12, tp=3, pp=4)
    roomy = map_gpus(layout, NO_SERVERS, Machine(num_nodes=2, gpus_per_node=8))
    assert all(len(nodes_of(roomy, group)) == 1 for group in groups(layout, "tp"))
    with pytest.raises(ConfigError, match=r"train.layout.tp = 3: must leave room for groups of 3 on nodes of 4 GPUs"):
        map_gpus(layout, NO_SERVERS, Machine(num_nodes=3, gpus_per_node=4))


def test_servers_of_several_nodes_get_whole_ones_that_follow_each_other():
    servers = ServerShape(num_servers=2, gpus_per_server=16, num_shared=0)
    mapped = map_gpus(Layout(ranks=12), servers, Machine(num_nodes=6, gpus_per_node=8))
    assert [[gpu.node for gpu in server[::8]] for server in mapped.servers] == [[2, 3], [4, 5]]
    with pytest.raises(ConfigError, match=r"of the others 36 GPUs, 1 servers of 16 can be made inside nodes"):
        map_gpus(Layout(ranks=20, tp=4), replace(servers, num_servers=2), Machine(num_nodes=7, gpus_per_node=8, nodes_per_domain=3))


def test_what_there_is_no_room_for_is_said_with_the_numbers():
    servers = ServerShape(num_servers=4, gpus_per_server=8, num_shared=2)
    with pytest.raises(ConfigError) as caught:
        map_gpus(Layout(ranks=8), servers, Machine(num_nodes=2, gpus_per_node=8))
    short, crowded = caught.value.problems
    assert "8 training ranks and servers on 16 GPUs of their own need 24; there are 16" in short.reason and "placement.nodes=3" in short.fix
    assert "2 servers of 8 are on the trainer's GPUs, and it has 8" in crowded.reason


# -- the settings ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    return load(["recipe=grpo-tiny-moe-1n2g-sync"])


def with_placement(config, offload="all", **placement):
    return replace(config, placement=PlacementConfig(**placement), train=replace(config.train, offload=offload))


def said(config):
    return [str(found) for found in placement_problems(config, facts_of(config.model))]


def test_one_node_without_a_number_of_gpus_takes_all(tiny):
    ranks = (MappedGPU(node=0, index=0), MappedGPU(node=0, index=1))
    assert gpu_map(tiny).ranks == ranks
    assert gpu_map(tiny).servers == ((MappedGPU(node=0, index=2),),)
    assert gpu_map(with_placement(tiny, mode="colocated")).servers == ((MappedGPU(node=0, index=0),),)


@pytest.mark.parametrize(
    ("changes", "placement", "rule"),
    [
        ({"max_staleness": 1}, {"mode": "colocated"}, r"max_staleness = 1: must be 0 with placement.mode=colocated"),
        ({}, {"mode": "colocated", "offload": "none"}, r"train.offload = 'none': must be all with placement.mode=colocated"),
        ({}, {"num_shared": 1}, r"placement.num_shared = 1: has no effect"),
        ({}, {"mode": "group_colocated"}, r"placement.num_shared = None: must be at least 1 and less than rollout.num_servers=1"),
        ({}, {"nodes": 2}, r"placement.gpus_per_node = None: must be given for more than one node"),
        ({"rollout": RolloutConfig(max_response_tokens=8, host="::1")}, {"nodes": 2, "gpus_per_node": 2}, r"rollout.host = '::1': has no"),
        ({"weights": WeightsConfig(transport="ipc")}, {"nodes": 2, "gpus_per_node": 2}, r"weights.transport = 'ipc': reaches one node"),
        ({}, {"topology": "/no/such/file"}, r"placement.topology = '/no/such/file': is not a file"),
        ({}, {"gpus_per_node": 2}, r"placement.nodes = 1: must be at least 2 with 2 GPUs each"),
        (
            {"rollout": RolloutConfig(max_response_tokens=8, engine="sglang", layout=ServerLayout(gpus=2, gpus_per_node=1))},
            {},
            r"placement.gpus_per_node = None: must put the 2 GPUs of a server on 2 nodes",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_contradict_each_other_are_refused(tiny, changes, placement, rule):
    (found,) = said(with_placement(replace(tiny, **changes), **placement))
    assert re.search(rule, found)
