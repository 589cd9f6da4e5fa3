"""What `moerl plan` takes from a recipe, and from options."""

from dataclasses import replace

import pytest

from moerl.config.load import load
from moerl.planner.push_plan import rollout_of
from moerl.types.errors import ConfigError
from moerl.weights.plan.transfer_plan import RolloutLayout


@pytest.fixture(scope="module")
def config():
    return load(["recipe=grpo-qwen3-235b-16n8g-sync"])


def test_the_fleet_of_a_plan_is_the_recipes(config):
    found = rollout_of(config, servers=None, gpus_per_server=None, gpus_per_node=None)
    assert found == RolloutLayout(num_servers=4, gpus_per_server=32, gpus_per_node=8, expert_parallel=32)


def test_options_replace_what_the_recipe_says(config):
    found = rollout_of(config, servers=2, gpus_per_server=16, gpus_per_node=4)
    assert found == RolloutLayout(num_servers=2, gpus_per_server=16, gpus_per_node=4)


def test_copies_that_an_engine_places_while_it_runs_cannot_be_planned(config):
    layout = replace(config.rollout.layout, redundant_experts=32)
    changed = replace(config, rollout=replace(config.rollout, layout=layout))
    with pytest.raises(ConfigError) as caught:
        rollout_of(changed, servers=None, gpus_per_server=None, gpus_per_node=None)
    assert [each.path for each in caught.value.problems] == ["rollout.layout.redundant_experts"]
