"""Every shipped recipe whose model was downloaded: whatever `moerl train` asks before it takes a GPU, nothing is refused."""

import json
import sys

import pytest

from moerl.check import load_checked
from moerl.cluster.forks.fork_server import VARIABLE
from moerl.config.compose import options
from moerl.config.derive.model_configs import published_config
from moerl.config.load import load
from moerl.config.rules import engine_rules
from moerl.rollout.datasets.load_dataset import load_dataset
from moerl.rollout.prompts import PromptSource
from moerl.scratch_model import character_tokenizer
from moerl.starting_model import load_model
from moerl.types.errors import ConfigError

RECIPES = options("recipe")
SERVED = [recipe for recipe in RECIPES if load([f"recipe={recipe}"]).rollout.engine == "sglang"]
"""By an engine with an environment of its own, which is asked too."""
ALWAYS = {"grpo-glm-4.5-8n8g-sync"}
IN_TURN = [pytest.param(each, marks=pytest.mark.matrix) if each in SERVED and each not in ALWAYS else each for each in RECIPES]
"""Those of engines with an environment of their own cost ten CPU seconds each."""
ROW = {"prompt": [{"role": "user", "content": "1 + 1"}], "reward_model": {"ground_truth": "2"}}


@pytest.fixture
def given(tmp_path):
    """From a recipe to its words, with a folder of its published model: its config.json, a small tokenizer, no weights."""

    def words(recipe):
        found = [f"recipe={recipe}", f"output_dir={tmp_path}"]
        config = load(found)
        published = config.model.published
        if published is None:
            return found
        if config.data.kind == "files":
            (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
            found.append(f"data.files=[{tmp_path / 'rows.jsonl'}]")
        directory = tmp_path / published
        character_tokenizer(128).save_pretrained(directory)
        (directory / "config.json").write_text(json.dumps(published_config(published)))
        (directory / "model.safetensors").touch()
        return [*found, f"model.path={directory}"]

    return words


def refused(words):
    try:
        load_checked(words, starts=True)
    except ConfigError as error:
        return [(each.path, each.rule) for each in error.problems]
    return []


@pytest.mark.parametrize("recipe", IN_TURN)
def test_a_recipe_with_its_model_starts_its_prompts_and_its_end_of_text_are_found(recipe, given, monkeypatch, fork_server):
    monkeypatch.setenv(VARIABLE, fork_server)
    monkeypatch.setattr(engine_rules, "_found_there", lambda *asked: ())  # the next test's
    words = given(recipe) + ([f"rollout.python={sys.executable}"] if recipe in SERVED else [])
    assert refused(words) == []
    config = load_checked(words)
    model = load_model(config)
    prompts = PromptSource(
        load_dataset(config.data, seed=config.seed), model.tokenizer, config.data, seed=config.seed, max_context=config.model.max_context,
        max_response_tokens=config.rollout.max_response_tokens,
    )  # fmt: skip
    assert prompts.prompt_at(0).token_ids and model.stop_token_ids


@pytest.mark.engine
@pytest.mark.parametrize("recipe", [each if each in ALWAYS else pytest.param(each, marks=pytest.mark.matrix) for each in SERVED])
def test_the_installed_engine_has_no_objection_to_a_recipe_with_its_model(recipe, given):
    assert refused(given(recipe)) == []
