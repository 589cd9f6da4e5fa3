"""Recipes for published models: checked before anything is downloaded, and against what was."""

import json

import pytest

from moerl.check import load_checked
from moerl.config.derive.model_configs import published_config, published_names
from moerl.types.errors import ConfigError

RECIPE = "recipe=grpo-glm-4.5-8n8g-sync"
FAKE = "rollout.engine=fake"
"""What the recipe's own engine asks of a checkpoint is tested in test_server_layout.py."""


@pytest.fixture
def downloaded(tmp_path):
    """A directory that looks like GLM-4.5, with other values in config.json."""

    def make(**changes):
        directory = tmp_path / "model"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(published_config("glm-4.5") | changes))
        for name in ("tokenizer.json", "model.safetensors"):
            (directory / name).touch()
        return f"model.path={directory}"

    return make


def problems(*overrides, starts=False):
    with pytest.raises(ConfigError) as caught:
        load_checked([RECIPE, FAKE, *overrides], starts=starts)
    return caught.value.problems


def test_a_layout_is_checked_against_a_model_that_is_not_here():
    (found,) = problems("train.layout.ranks=192", "train.layout.ep=48", "placement.nodes=24")
    assert (found.path, found.rule) == ("train.layout.ep", "must divide the model's 160 experts")


def test_a_run_without_its_checkpoint_is_checked_but_does_not_start(downloaded):
    load_checked([RECIPE])
    (found,) = problems(starts=True)
    assert (found.path, found.value) == ("model.path", None)
    load_checked([RECIPE, FAKE, downloaded()], starts=True)


def test_another_model_than_the_recipes_is_refused_with_what_differs(downloaded):
    (found,) = problems(downloaded(num_hidden_layers=96, vocab_size=1000))
    assert found.rule == "must be glm-4.5"
    assert "num_layers 96, not 92" in found.reason and "vocab_size 1000, not 151552" in found.reason


def test_another_context_of_the_same_architecture_is_accepted(downloaded):
    load_checked([RECIPE, FAKE, downloaded(max_position_embeddings=202752, torch_dtype="float32")])


def test_an_unknown_published_model_is_refused_with_the_known_ones():
    found = problems("model.published=glm-9")[0]
    assert found.path == "model.published"
    assert all(name in found.fix for name in published_names())


def test_a_published_model_is_not_made_from_scratch():
    assert next(each.path for each in problems("model.scratch={family: qwen3_moe}")) == "model.published"
