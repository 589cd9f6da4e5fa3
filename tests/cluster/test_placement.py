"""Places in a real Ray cluster of one node that is told it has GPUs, and in lists of nodes that it could have."""

import os
from dataclasses import replace

import pytest
import ray

from moerl.cluster import placement as placement_module
from moerl.cluster.placement import Node, _nodes, find_placement
from moerl.cluster.run_secret import RunSecret
from moerl.config.load import load
from moerl.config.schema.run_config import PlacementConfig
from moerl.rollout.build_engines import build_engines
from moerl.types.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Whose GPUs are 4 to 7 of the machine, as a job's may be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=1, num_gpus=4)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def config():
    return load(["recipe=grpo-tiny-moe-1n2g-sync", "train.offload=all"])


def on(config, *, engine="sglang", **placement):
    return replace(config, rollout=replace(config.rollout, engine=engine), placement=PlacementConfig(**placement))


def gpus(places):
    return [place.gpus for place in places]


def of_servers(placement):
    return [place for nodes in placement.servers for place in nodes]


def test_ranks_and_servers_see_the_gpus_of_the_map_under_the_names_the_job_has_for_them(config):
    separate = find_placement(on(config))
    assert (gpus(separate.ranks), gpus(of_servers(separate))) == ([("4",), ("5",)], [("6",)])
    colocated = find_placement(on(config, mode="colocated"))
    assert (gpus(colocated.ranks), gpus(of_servers(colocated))) == ([("4",), ("5",)], [("4",)])
    assert {place.node.id for place in (*separate.ranks, *of_servers(separate))} == {separate.here}


def test_the_hf_server_needs_no_gpu_and_takes_none(config):
    placement = find_placement(on(replace(config, train=replace(config.train, layout=replace(config.train.layout, ranks=4))), engine="hf"))
    assert (gpus(placement.ranks), gpus(of_servers(placement))) == ([("4",), ("5",), ("6",), ("7",)], [()])


def test_more_ranks_and_servers_than_gpus_are_refused_and_run_on_cpu_if_that_is_asked_for(config):
    large = replace(config, train=replace(config.train, layout=replace(config.train.layout, ranks=4)))
    with pytest.raises(
        ConfigError, match=r"placement.device = 'auto': needs 5 GPUs on node .*, which has 4\n.*\n    fix: placement.device=cpu"
    ):
        find_placement(on(large))
    placement = find_placement(on(large, device="cpu"))
    assert not placement.on_gpus
    assert gpus([*placement.ranks, *of_servers(placement)]) == [()] * 5


@pytest.mark.parametrize(("placed", "seen"), [({}, "6"), ({"device": "cpu"}, "")])
def test_a_server_process_sees_its_gpus_only(config, tmp_path, placed, seen):
    chosen = on(config, **placed)
    (engine,) = build_engines(chosen, tmp_path, tmp_path, RunSecret.new(), find_placement(chosen))
    assert (engine.host, engine._process._environment) == ("127.0.0.1", {"CUDA_VISIBLE_DEVICES": seen})


@pytest.mark.parametrize("own", [("6",), ()])
def test_a_rank_sees_its_gpu_before_anything_asks_cuda(config, own):
    from moerl.train.train_worker import SAVE_THREAD, TrainWorker

    class Looking(TrainWorker):
        def looks(self):
            return os.environ["CUDA_VISIBLE_DEVICES"]

    worker = ray.remote(num_gpus=len(own), concurrency_groups={SAVE_THREAD: 1})(Looking).remote(0, 1, own)
    assert ray.get(worker.looks.remote()) == ",".join(own)
    ray.kill(worker)


def node(name, num_gpus=8, address="10.0.0.1"):
    return Node(id=f"id-{name}", name=name, address=address, num_gpus=num_gpus, num_cpus=64)


def test_nodes_are_taken_in_the_order_of_their_names_or_of_the_topology(tmp_path):
    alive = [node("gpu10"), node("gpu2"), node("head", num_gpus=0), node("gpu1")]
    placement = PlacementConfig(nodes=2, gpus_per_node=8)
    assert [each.name for each in _nodes(placement, alive, "id-head")] == ["gpu1", "gpu2"]
    file = tmp_path / "topology.conf"
    file.write_text("SwitchName=a Nodes=gpu[2,10]\nSwitchName=b Nodes=gpu1\nSwitchName=top Switches=a,b\n")
    assert [each.name for each in _nodes(replace(placement, topology=str(file)), alive, "id-head")] == ["gpu2", "gpu10"]


def test_one_node_is_the_drivers_if_it_has_the_gpus():
    alive = [node("a"), node("b"), node("c", num_gpus=0)]
    placement = PlacementConfig(gpus_per_node=8)
    assert [each.name for each in _nodes(placement, alive, "id-b")] == ["b"]
    assert [each.name for each in _nodes(placement, alive, "id-c")] == ["a"]


def test_a_recipe_of_a_gpu_does_not_train_on_cpu_unasked(config):
    alive = [node("head", num_gpus=0), node("other", num_gpus=0)]
    named = load(["recipe=grpo-tiny-moe-1n2g-sync", "hardware=h100-80"]).placement
    with pytest.raises(ConfigError, match=r"placement.gpu = 'h100-80': must be there.*\n.*have none \(head, other\)") as raised:
        _nodes(named, alive, "id-head")
    assert "placement.device=cpu" in str(raised.value)
    assert _nodes(replace(named, device="cpu"), alive, "id-head") == alive[:1]
    assert _nodes(config.placement, alive, "id-head") == alive[:1], "a recipe that names no GPU runs where it is"


def test_missing_and_small_nodes_are_named():
    alive = [node("gpu1"), node("gpu2", num_gpus=7)]
    with pytest.raises(ConfigError, match=r"placement.nodes = 2: must be there.*\n.*1 nodes with 8 GPUs: gpu1; too small: gpu2 \(7 GPUs\)"):
        _nodes(PlacementConfig(nodes=2, gpus_per_node=8), alive, "id-gpu1")


def test_gpus_that_another_job_of_the_cluster_holds_are_told_and_not_waited_for_without_end(config, monkeypatch):
    holder = ray.remote(num_gpus=1, num_cpus=0)(Holder).remote()
    ray.get(holder.__ray_ready__.remote())
    try:
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"GPUs that nobody else has\n.*within 1 s on .* \(4 GPUs\)"):
            patch.setattr(placement_module, "_FREE_SECONDS", 1.0)
            find_placement(on(config))
    finally:
        ray.kill(holder)
    assert gpus(find_placement(on(config)).ranks) == [("4",), ("5",)]


class Holder:
    """An actor of somebody else's."""
