"""Composition and schema: what a person can get wrong on the command line or in a file, and what is said about it."""

import subprocess
import sys

import pytest
import yaml

from moerl.config.algorithm_settings import algorithm
from moerl.config.compose import compose, options
from moerl.config.load import build, checked, load, to_plain, to_yaml
from moerl.types.errors import ConfigError, Problem

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"
LONG = ("logprobs", "update", "save")
"""Phases whose deadline is an hour, beside that of loading."""


def problems_of(*overrides: str, config_dir=None) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load(overrides, config_dir)
    return caught.value.problems


def test_the_large_dapo_recipe_has_the_settings_of_the_paper():
    """Section 4.1 of arXiv:2503.14476."""
    config = load(["recipe=dapo-qwen3-235b-16n8g-sync"])
    assert config.algorithm == algorithm("dapo", "overlong_buffer=4096")
    assert (config.groups_per_step, config.group_size, config.train.updates_per_step) == (512, 16, 16)
    assert (config.train.optimizer.lr, config.train.optimizer.warmup_steps, config.rollout.max_response_tokens) == (1e-6, 20, 20480)


def test_an_override_wins_over_the_recipe_and_a_setting_no_file_mentions_can_be_set():
    config = load([DEMO, "num_steps=7", "deadlines.start_seconds=5", "observe.wandb_project=x"])
    assert (config.num_steps, config.deadlines.start_seconds, config.observe.wandb_project) == (7, 5.0, "x")


def test_a_group_file_replaces_the_recipes_choice():
    assert load([DEMO]).algorithm == algorithm("grpo")
    assert load([DEMO, "algorithm=dapo", "algorithm.overlong=none"]).algorithm == algorithm("dapo", "overlong=none")


@pytest.mark.parametrize(
    ("override", "path", "said"),
    [
        ("train.layuot.tp=2", "train.layuot", "did you mean train.layout?"),
        ("train.layout.tpp=2", "train.layout.tpp", "did you mean train.layout.tp?"),
        ("+train.lay=1", "train.lay", "did you mean train.layout?"),
        ("tp=2", "tp", "did you mean train.layout.tp?"),
        ("algorithm.kl=1", "algorithm.kl", "did you mean algorithm.kl_coefficient?"),
        ("algorithm.clip_low=0.1", "algorithm.clip_low", "did you mean algorithm.objective.clip_low?"),
        ("algorithm.name=gspo", "algorithm.name", "algorithm=NAME in the command"),
        ("algorithm.objective.kind=gspoo", "algorithm.objective.kind", "gspo"),
        ("algorithm.max_attempts=0", "algorithm.max_attempts", "must be an integer > 0"),
        ("zzz=1", "zzz", "a run has name, num_steps"),
        ("data.sise=3", "data.sise", "did you mean data.size?"),
        ("reward.terms.repeat.wieght=2", "reward.terms.repeat.wieght", "did you mean reward.terms.repeat.weight?"),
        ("num_steps='4'", "num_steps", "must be an integer > 0"),
        ("num_steps=1e2", "num_steps", "must be an integer > 0"),
        ("num_steps=true", "num_steps", "must be an integer > 0"),
        ("num_steps=0", "num_steps", "must be an integer > 0"),
        ("num_steps=null", "num_steps", "must be an integer > 0"),
        ("name=3", "name", "must be text"),
        ("deterministic=1", "deterministic", "must be true or false"),
        ("algorithm.objective.clip_low=1.5", "algorithm.objective.clip_low", "must be a number > 0 and <= 1"),
        ("algorithm.objective.dual_clip=1", "algorithm.objective.dual_clip", "must be a number > 1, or null"),
        ("train.optimizer.betas=[0.9]", "train.optimizer.betas", "must be a list of 2 values"),
        ("train.optimizer.betas=[0.9,b]", "train.optimizer.betas.1", "must be a number"),
        ("train.dtype=float16", "train.dtype", "train.dtype=bfloat16"),
        ("train.layout=3", "train.layout", "must be a section with"),
        ("rollout.engine=vlm", "rollout.engine", "must be one of hf, vllm, sglang, fake"),
        ("data.kind=tinny", "data.kind", "data.kind=tiny"),
        ("data.task=repaet", "data.task", "data.task=repeat"),
        ("~data.kind", "data.kind", "data.kind=<one of files, gym, tiny>"),
        ("~train.optimizer.lr", "train.optimizer.lr", "write train.optimizer.lr=<a number > 0>"),
        ("train.micro_batch_tokens=???", "train.micro_batch_tokens", "leaves it open with ???"),
        ("data.task=???", "data.task", "write data.task=<one of repeat, add>"),
        ("model.path=???", "model.path", "write model.path=<text, or null>"),
        ("slurm.account=12345", "slurm.account", 'in quotes: \'slurm.account="..."\', in a file account: "..."'),
        ("model=tiny", "model", "qwen3-30b-a3b, tiny-moe"),
        ("num_steps=1,2", "num_steps", "a command is one run"),
        ("num_steps", "override", "must read key=value"),
        ("=3", "override", "there is no key before ="),
        ("name=[a", "override", "must read key=value"),
        ("hydra.run.dir=x", "hydra.run.dir", "is not a setting"),
        ("rollout.over_sampling=1.5", "rollout.over_sampling", "is not a setting"),
        ("~namee", "configuration", "'namee' does not exist"),
        ("name=${nmae}", "name", "Interpolation key 'nmae' not found"),
    ],
)
def test_a_wrong_override_is_one_problem_with_its_path_and_what_to_write(override: str, path: str, said: str):
    (problem,) = problems_of(DEMO, override)
    assert problem.path == path
    assert said in str(problem)


def test_a_section_of_a_group_can_be_replaced_by_values():
    config = load([DEMO, "~data", "data={kind:gym,task:chain_sum,max_prompt_tokens:16}", "reward.terms.repeat.kind=gym"])
    assert to_plain(config)["data"]["kind"] == "gym"


def test_a_command_without_a_recipe_lists_them():
    (problem,) = problems_of("num_steps=3")
    assert problem.path == "recipe"
    assert all(name in problem.fix for name in options("recipe"))


def test_all_problems_of_the_command_line_come_at_once():
    assert [p.path for p in problems_of("a b", "num_steps=1,2", "model=x")] == ["override", "num_steps", "recipe", "model"]


def test_all_problems_of_the_schema_come_at_once():
    found = problems_of(DEMO, "num_steps=x", "zzz=1", "data.task=no", "~train.optimizer.lr", "model.max_context=-1")
    assert {p.path for p in found} == {"num_steps", "zzz", "data.task", "train.optimizer.lr", "model.max_context"}


def test_all_problems_across_fields_come_at_once_with_those_of_other_packages():
    extra = Problem(path="reward", value=1, rule="r", reason="w", fix="f")
    with pytest.raises(ConfigError) as caught:
        checked(compose([DEMO, "group_size=1", "train.layout.tp=3"]), [lambda config, facts: [extra]])
    paths = [problem.path for problem in caught.value.problems]
    assert {"group_size", "train.layout.tp", "train.layout.ranks", "reward"} <= set(paths)


def test_the_error_text_counts_and_lists_every_problem():
    with pytest.raises(ConfigError) as caught:
        load([DEMO, "num_steps=x", "zzz=1"])
    text = str(caught.value)
    assert text.startswith("2 problems in the configuration\n")
    assert text.count("why:") == text.count("fix:") == 2


def test_recipes_of_a_users_own_directory_can_build_on_shipped_ones(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [grpo-tiny-moe-1n2g-sync, _self_]\nname: mine\nweights:\n  mismatch_limit: ???\n"
    )
    config = load(["recipe=mine", "weights.mismatch_limit=1e-3"], tmp_path)
    assert (config.name, config.weights.mismatch_limit, config.groups_per_step) == ("mine", 1e-3, 32)
    (problem,) = problems_of("recipe=mine", config_dir=tmp_path)
    assert problem.path == "weights.mismatch_limit"


@pytest.mark.parametrize("name", ["Ann's", "a\\'b", "a b,c=${d}", "e\\"])
def test_a_directory_of_recipes_may_have_any_name(tmp_path, name):
    recipes = tmp_path / name / "recipe"
    recipes.mkdir(parents=True)
    (recipes / "mine.yaml").write_text("# @package _global_\ndefaults: [grpo-tiny-moe-1n2g-sync, _self_]\nname: mine\n")
    assert load(["recipe=mine"], tmp_path / name).name == "mine"


def test_a_users_recipe_may_not_hide_a_shipped_one(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "grpo-tiny-moe-1n2g-sync.yaml").write_text("name: other\n")
    (problem,) = problems_of(DEMO, config_dir=tmp_path)
    assert "give your own another name" in problem.fix


def test_a_working_directory_that_is_gone_is_said(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    (problem,) = problems_of(DEMO)
    assert (problem.path, problem.rule) == ("working directory", "must exist")


def test_an_interpreter_without_assertions_is_refused():
    """Hydra reads lists and sections inside of them, and ended in a traceback."""
    code = f"from moerl.config.load import load\nload([{DEMO!r}])"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=120)
    assert "python -O = (not set): must not be given" in done.stderr


def test_a_config_directory_that_does_not_exist_is_said(tmp_path):
    (problem,) = problems_of(DEMO, config_dir=tmp_path / "none")
    assert problem.path == "--config-dir"


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("bare", "defaults: [grpo-tiny-moe-1n2g-sync, _self_]\nname: mine\n", "must begin with # @package _global_"),
        ("empty", "", "must begin with # @package _global_"),
        ("list", "- 1\n", "must begin with # @package _global_"),
        ("itself", "# @package _global_\ndefaults: [itself, _self_]\nname: mine\n", "cannot be composed"),
    ],
)
def test_a_recipe_that_is_none_names_its_file_once(tmp_path, name, text, rule):
    (tmp_path / "recipe").mkdir()
    file = tmp_path / "recipe" / f"{name}.yaml"
    file.write_text(text)
    (problem,) = problems_of(f"recipe={name}", config_dir=tmp_path)
    assert (problem.path, problem.value, problem.rule) == ("recipe", str(file), rule)


def test_a_folder_that_is_named_like_a_recipe_is_none(tmp_path):
    (tmp_path / "recipe" / "folder.yaml").mkdir(parents=True)
    assert "folder" not in options("recipe", tmp_path)


def test_a_value_in_the_place_of_a_section_is_told_by_its_own_key():
    (problem,) = problems_of(DEMO, "train.layout=[1,2]")
    assert (problem.path, problem.value, problem.rule) == ("train.layout", "[1,2]", "must be a section of settings")


def test_the_limit_of_a_mismatch_follows_the_numbers_that_are_compared():
    """The default of neither ends a run by the default of the other."""
    fp8 = ("train.dtype=bfloat16", "rollout.layout.weights=fp8")
    limits = [load([DEMO, *more]).mismatch_limit for more in ((), ("train.dtype=bfloat16",), fp8, (*fp8, "weights.mismatch_limit=0.01"))]
    assert limits == [1e-4, 0.1, 0.2, 0.01]


def test_broken_yaml_names_the_file_and_line(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("name: [a\nb: 3\n")
    (problem,) = problems_of("recipe=mine", config_dir=tmp_path)
    assert "mine.yaml" in problem.reason
    assert "line 2" in problem.reason


@pytest.mark.parametrize("recipe", options("recipe"))
def test_yaml_round_trips_every_setting(recipe: str):
    config = load([f"recipe={recipe}", "train.optimizer.eps=1e-12", "name=on"])
    assert build(yaml.safe_load(to_yaml(config))) == config


def test_plain_form_holds_defaults_too():
    plain = to_plain(load([DEMO]))
    assert plain["weights"]["bucket_bytes"] == 256 * 2**20
    assert plain["train"]["optimizer"]["betas"] == [0.9, 0.95]


def test_an_algorithm_that_there_is_not_is_answered_with_those_there_are():
    (problem,) = problems_of(DEMO, "algorithm=vapo")
    assert "one of" in problem.fix and "grpo" in problem.fix and "dapo" in problem.fix and "=grpo" not in problem.fix


def test_a_recipe_that_there_is_not_is_answered_with_the_nearest_and_all():
    (problem,) = problems_of("recipe=grpo-tiny-moe-1n2g-async")
    assert problem.fix.startswith("recipe=grpo-tiny-moe-1n2g-sync? Known: ") and "dapo-tiny-moe-1n2g-async" in problem.fix


def test_of_two_recipes_in_one_command_neither_wins():
    (problem,) = problems_of(DEMO, "num_steps=3", "recipe=grpo-tiny-add-1n2g-sync")
    assert (problem.path, problem.rule) == ("recipe", "must be named once")
    (problem,) = problems_of(DEMO, "algorithm=dapo", "algorithm=grpo")
    assert problem.path == "algorithm"


@pytest.mark.parametrize(
    ("overrides", "paths"),
    [
        (["slurm.time='5'"], ["slurm.time"]),
        (["slurm.time=1:2:3:4"], ["slurm.time"]),
        (["slurm.time=01:00:00"], ["deadlines.load_seconds", "deadlines.rollout_seconds", *(f"deadlines.{name}_seconds" for name in LONG)]),
        (["slurm.time=01:00:01", "deadlines.rollout_seconds=900"], []),
        (["slurm.time=0-3"], []),
        (["slurm.time='0'"], []),
    ],
)
def test_a_time_limit_leaves_room_for_the_end_and_for_every_deadline(overrides, paths):
    if paths:
        assert sorted(problem.path for problem in problems_of(DEMO, *overrides)) == sorted(paths)
    else:
        load([DEMO, *overrides])
