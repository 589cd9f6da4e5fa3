"""Models beside the policy in the settings: what is refused, and what each is trained by."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.check import load_checked
from moerl.config.derive.companion_models import companion_config, companion_models, makes_room, own_layouts, without_companions
from moerl.config.derive.gpu_map import gpu_map
from moerl.config.load import load
from moerl.config.rules.companion_rules import source_problems, tokenizer_difference
from moerl.config.schema.companion_config import DistillationConfig, TeacherConfig
from moerl.scratch_model import write_scratch_model
from moerl.types.errors import ConfigError

RECIPE = "recipe=grpo-tiny-moe-1n2g-sync"


def refused(*overrides):
    with pytest.raises(ConfigError) as caught:
        load([RECIPE, *overrides])
    return {problem.path: f"{problem.rule}; {problem.reason}; {problem.fix}" for problem in caught.value.problems}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of a model like the recipe's, of 2 layers."""
    config = load([RECIPE, "model.scratch.num_layers=2"])
    directory = tmp_path_factory.mktemp("model") / "model"
    write_scratch_model(config.model.scratch, config.model.max_context, directory, 0)
    return directory


@pytest.fixture
def other(model, tmp_path):
    """The same with two tokens' numbers exchanged."""
    directory = tmp_path / "other"
    shutil.copytree(model, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


@pytest.mark.parametrize(
    ("overrides", "path", "said"),
    [
        (["critic.clip=0.1"], "critic.clip", "has no effect; algorithm.advantage.kind=grpo does not ask it"),
        (["outcome_model.right_above=1"], "outcome_model.right_above", "has no effect"),
        (["algorithm=ppo", "critic.warmup_steps=100"], "critic.warmup_steps", "must be less than num_steps=100"),
        (["algorithm=ppo", "critic.layout={ranks: 2, tp: 4}"], "critic.layout.ranks", "must be a multiple of tp * pp * cp = 4"),
        (["algorithm=ppo", "critic.path=/nowhere"], "critic.path", "is not a directory"),
        (["algorithm=ppo", "train.destroy_groups=true", "train.offload=all"], "train.destroy_groups", "must be false with critic"),
        (["algorithm=ppo", "critic.optimizer={lr: 1, min_lr: 2}"], "critic.optimizer.min_lr", "must be at most lr=1"),
        (
            ["algorithm=ppo", "critic.layout={ranks: 4, cp: 4}", "train.micro_batch_tokens=36"],
            "critic.path", "train.micro_batch_tokens = 36 must be a multiple of 8",
        ),
        (
            ["algorithm=ppo", "train.recompute={kind: full, num_layers: 2}", "critic.layout={ranks: 4, pp: 4}"],
            "critic.path", "train.recompute.num_layers = 2 must be at most 1",
        ),
        (["algorithm=prime", "group_size=1"], "group_size", "must be at least 2"),
        (["+distillation={shown: '{answer}'}", "algorithm.entropy_bonus=0.1"], "algorithm.entropy_bonus", "has no effect"),
        (["+distillation={}"], "distillation.teachers", "must have a teacher"),
        (["+distillation={shown: look}"], "distillation.shown", "must have {answer}"),
        (["algorithm=prime", "+distillation={shown: '{answer}'}"], "distillation.trains_rewards", "must be true with outcome_model"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(overrides, path, said):
    assert said in refused(*overrides)[path]


def test_teachers_share_out_the_sources(model):
    teachers = f"+distillation={{teachers: {{a: {{path: {model}}}, b: {{path: {model}}}, c@d: {{path: {model}, data_sources: [x, x]}}}}}}"
    found = refused(f"{teachers[:-1]}, shown: '{{answer}}'}}")
    assert "must name sources; a and b are both for all" in found["distillation.teachers.b.data_sources"]
    assert "names x again" in found["distillation.teachers.c@d.data_sources"]
    assert "must be letters" in found["distillation.teachers.c@d"]
    assert "a teaches all prompts" in found["distillation.shown"]


def test_a_model_of_other_tokens_or_that_does_not_fit_the_ranks_is_refused(model, other):
    named = f"{{path: {other}}}"
    of_model = ("~model.scratch", f"+model.path={model}")
    found = refused(*of_model, f"+distillation={{teachers: {{a: {named}}}}}")
    assert "must have the policy's tokenizer" in found["distillation.teachers.a.path"]
    assert "2 of" in found["distillation.teachers.a.path"]
    found = refused("algorithm=ppo", f"critic.path={model}", "train.layout.pp=4", "train.layout.ranks=4", "train.layout.ep=1")
    assert "must fit train.layout.pp; it is on the policy's ranks" in found["critic.path"]
    assert "critic.layout" in found["critic.path"]


def test_tokens_are_compared_by_their_numbers_whatever_else_the_files_say(model, other, tmp_path):
    same = tmp_path / "same"
    shutil.copytree(model, same)
    text = json.loads((same / "tokenizer.json").read_text())
    (same / "tokenizer.json").write_text(json.dumps(text | {"version": "another"}, indent=3))
    assert tokenizer_difference(model, same) is None
    assert "token" in tokenizer_difference(model, other)
    (same / "tokenizer.json").unlink()
    assert tokenizer_difference(model, same) is not None
    for folder in (same, tmp_path):
        (folder / "tokenizer.model").write_bytes(b"the same")
    assert tokenizer_difference(same, tmp_path) is None


def test_a_model_on_its_own_ranks_has_gpus_of_its_own_and_settings_of_its_own():
    config = load([RECIPE, "algorithm=ppo", "critic.layout={ranks: 4, ep: 2}", "critic.optimizer={lr: 0.01}", "train.offload=optimizer"])
    (critic,) = companion_models(config)
    own = companion_config(config, critic).train
    assert (own.layout.ranks, own.optimizer.lr, own.offload) == (4, 0.01, "none")
    assert own_layouts(config) == {"critic": config.critic.layout}
    mapped = gpu_map(config)
    everybody = [*mapped.ranks, *mapped.beside["critic"], *(gpu for gpus in mapped.servers for gpu in gpus)]
    assert len(mapped.beside["critic"]) == 4
    assert len(set(everybody)) == len(everybody)


def test_models_are_there_only_if_somebody_needs_them():
    assert [model.name for model in companion_models(load([RECIPE]))] == []
    assert [model.name for model in companion_models(load([RECIPE, "algorithm=prime"]))] == ["outcome_model"]


def test_a_distance_alone_needs_no_pass_of_the_algorithm_s_and_the_old_policy_where_it_moves():
    for more, is_asked in ((["train.updates_per_step=2"], True), ([], False)):
        config = load([RECIPE, "+distillation={shown: '{answer}'}", *more])
        assert (config.uses_reference, config.needs_old_logprobs) == (False, is_asked)
    both = load(
        [RECIPE, "+distillation={shown: '{answer}', trains_rewards: true}", "train.updates_per_step=2", "algorithm.kl_coefficient=0.1"]
    )
    assert (both.uses_reference, both.needs_old_logprobs) == (True, True)


def test_a_teacher_needs_what_sampling_left_of_the_vocabulary():
    filtered = ("+distillation={shown: '{answer}'}", "rollout.top_p=0.7", "weights.mismatch_limit=1.0")
    assert "must be rollout with distillation" in refused(*filtered, "train.sampling_replay=off")["train.sampling_replay"]
    assert load([RECIPE, *filtered]).replays_sets


def test_teachers_are_of_sources_that_rows_have():
    distillation = DistillationConfig(teachers={"one": TeacherConfig(path="/x", data_sources=("maths", "code"))})
    (unknown, left) = source_problems(distillation, {"math", "code"})
    assert (unknown.path, unknown.rule) == ("distillation.teachers.one.data_sources", "names maths, which no row has")
    assert "data_source math too" in left.reason
    assert [each.path for each in source_problems(replace(distillation, shown="{answer}"), {"math", "code"})] == [unknown.path]


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm=ppo", "critic.path=/nowhere"],
        ["algorithm=ppo", "critic.layout={ranks: 2, tp: 4}"],
        ["+distillation={teachers: {one: {path: /nowhere}}}"],
        ["algorithm.objective={kind: custom, path: nowhere.py:X}"],
    ],
)
def test_a_plan_of_memory_is_not_asked_about_models_that_are_not_known(overrides):
    with pytest.raises(ConfigError):
        load_checked(["recipe=grpo-qwen3-235b-16n8g-sync", *overrides])


def test_an_evaluation_needs_neither_gpus_nor_folders_of_models_beside_the_policy():
    config = load([RECIPE, "algorithm=ppo", "critic.layout={ranks: 4}"])
    taught = replace(config, distillation=DistillationConfig(teachers={"one": TeacherConfig(path="/gone")}))
    alone = without_companions(taught)
    assert own_layouts(alone) == {}
    assert [model.path for model in companion_models(alone)] == [None]


def test_the_commands_of_the_page_have_settings_that_a_run_takes(model):
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    commands = [shlex.split(line) for line in re.findall(r"^    \$ moerl train (.*)$", page, re.MULTILINE)]
    assert len(commands) >= 6
    for words in commands:
        load([word.replace("DIRECTORY", str(model)) for word in words])


@pytest.mark.parametrize(
    ("overrides", "makes"),
    [
        (["train.offload=all"], False),
        (["algorithm=ppo", "train.offload=all"], True),
        (["algorithm=ppo"], False),
        (["algorithm=ppo", "train.offload=all", "critic.layout={ranks: 1}"], False),
    ],
)
def test_the_policy_makes_room_for_models_on_its_own_ranks_alone(overrides, makes):
    assert makes_room(load([RECIPE, *overrides])) is makes
