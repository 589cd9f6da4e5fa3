"""What a run's samples take of Ray's object store."""

from dataclasses import replace

import pytest

from moerl.config.derive.collectors import BYTES_PER_SECOND, collectors_per_server, num_collectors, reception_seconds
from moerl.config.derive.object_store import most_bytes, sample_bytes, shortage
from moerl.config.load import load
from moerl.config.summary import summary

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"
SIZES = ["groups_per_step=1024", "group_size=8", "model.max_context=4096", "data.max_prompt_tokens=96", "rollout.max_response_tokens=4000",
         "train.micro_batch_tokens=4096"]  # fmt: skip


def test_the_longest_samples_of_every_slot_are_counted_with_their_routes():
    config = load([DEMO, *SIZES])
    assert sample_bytes(config) == 4096 * 12
    assert most_bytes(config) == 8192 * 4096 * 12
    replayed = load([DEMO, *SIZES, "train.router_replay=rollout"])
    assert sample_bytes(replayed) == 4096 * (12 + 4 * 2)  # 4 layers, top 2, a byte each
    assert most_bytes(replace(config, max_staleness=2)) == 3 * most_bytes(config)
    assert most_bytes(replace(config, max_staleness=2, groups_in_flight=2048)) == 2 * most_bytes(config)
    assert most_bytes(replace(config, spare_groups=512)) == 1.5 * most_bytes(config)


def test_log_probs_that_the_trainer_adds_are_counted_once():
    config = load([DEMO, *SIZES, "train.updates_per_step=2", "algorithm.kl_coefficient=0.1"])
    assert most_bytes(config) == 8192 * 4096 * (12 + 2 * 4)


def test_a_store_that_may_be_too_small_is_told_with_what_is_needed():
    config = load([DEMO, *SIZES])
    assert shortage(config, most_bytes(config)) is None
    said = shortage(config, 1e8)
    assert said.startswith("Ray's object store has 0.1 GB, and the samples of 1024 groups in flight take up to 0.403 GB")
    assert f"--object-store-memory={most_bytes(config)}" in said


@pytest.mark.parametrize(
    ("servers", "nodes", "step_gigabytes", "wanted"),
    [(1, 1, 0.001, 1), (4, 4, 0.001, 4), (8, 2, 0.001, 2), (8, 2, 3.5, 4), (2, 2, 3.5, 4), (8, 2, 100, 20), (2, 8, 100, 20)],
)
def test_collectors_are_as_many_on_each_node_with_servers_as_the_bytes_of_a_step_need(servers, nodes, step_gigabytes, wanted):
    config = load([DEMO])
    per_sample = sample_bytes(config)
    rollout, placement = replace(config.rollout, num_servers=servers), replace(config.placement, nodes=nodes)
    groups = max(1, round(step_gigabytes * 1e9 / per_sample / config.group_size))
    config = replace(config, rollout=rollout, placement=placement, groups_per_step=groups)
    assert (num_collectors(config), collectors_per_server(config)) == (wanted, -(-wanted // servers))
    step = groups * config.group_size * per_sample
    assert reception_seconds(config) == pytest.approx(step / wanted / BYTES_PER_SECOND)
    assert f"# reception       {wanted} collector(s), at most {step / wanted / BYTES_PER_SECOND:.2g} s for" in summary(config)
    chosen = replace(config, rollout=replace(rollout, num_collectors=3))
    assert num_collectors(chosen) == 3
    assert collectors_per_server(chosen) == {1: 3, 2: 2, 4: 1, 8: 1}[servers]
