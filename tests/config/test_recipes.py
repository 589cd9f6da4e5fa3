"""The files under configs/."""

import re

import pytest
import yaml

from moerl.check import load_checked
from moerl.config.compose import options, shipped_configs
from moerl.config.derive.gpu_map import num_gpus

RECIPES = options("recipe")


def defaults(recipe: str) -> list:
    """Groups of a recipe, with those of the recipe that it begins with."""
    found = yaml.safe_load((shipped_configs() / "recipe" / f"{recipe}.yaml").read_text())["defaults"]
    return [*(entry for base in found if base in RECIPES for entry in defaults(base)), *found]


def test_there_are_recipes():
    assert "grpo-tiny-moe-1n2g-sync" in RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_valid(recipe: str, tmp_path):
    config = load_checked([f"recipe={recipe}", f"output_dir={tmp_path}"])
    assert config.name == recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipes_name_says_what_it_runs(recipe: str, tmp_path):
    config = load_checked([f"recipe={recipe}", f"output_dir={tmp_path}"])
    match = re.fullmatch(r"(\w+)-(.+)-(\d+)n(\d+)g-(sync|async)", recipe)
    assert match is not None, "names read <algorithm>-<model>-<nodes>n<ranks per node>g-<sync|async>"
    algorithm, _, nodes, ranks, mode = match.groups()
    assert {"/algorithm": algorithm} in defaults(recipe)
    own = config.train.layout.ranks if config.placement.gpus_per_node is None else num_gpus(config)
    assert int(nodes) * int(ranks) == own
    assert int(nodes) == config.placement.nodes
    assert config.placement.gpus_per_node in (None, int(ranks))
    assert (mode == "async") == (config.max_staleness > 0)


@pytest.mark.parametrize("group", ["model", "layout", "data"])
def test_every_group_file_is_used_by_some_recipe(group: str):
    used = set()
    for recipe in RECIPES:
        used |= {entry[f"/{group}"] for entry in defaults(recipe) if isinstance(entry, dict) and f"/{group}" in entry}
    assert used == set(options(group))
