"""Continuing a run: what may differ from its saved settings."""

import pytest

from moerl.config.load import load, to_yaml
from moerl.config.resume import FIXED, resume_differences
from moerl.types.errors import ConfigError

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"


def differences(*overrides: str) -> list[str]:
    return [problem.path for problem in resume_differences(to_yaml(load([DEMO])), load([DEMO, *overrides]))]


@pytest.mark.parametrize(
    "override",
    [
        "num_steps=500",
        "save_every=1",
        "observe.wandb=offline",
        "rollout.num_servers=2",
        "reward.terms.repeat.weight=2.0",
        "algorithm.objective.clip_high=0.3",
        "train.layout.ep=1",
        "train.dtype=bfloat16",
    ],
)
def test_settings_that_act_step_by_step_may_change(override: str):
    assert differences(override) == []


@pytest.mark.parametrize(
    ("overrides", "paths"),
    [
        (["seed=1"], ["seed"]),
        (["model.scratch.num_layers=2", "data.size=5"], ["model.scratch.num_layers", "data.size"]),
        (["data.task=add"], ["data.task"]),
        (["group_size=4"], ["group_size"]),
        (["algorithm=cispo"], ["algorithm.objective.kind"]),
        (["algorithm=rloo"], ["algorithm.advantage.kind", "algorithm.objective.kind"]),
        (["sft={num_steps:1,batch_size:1,lr:0.1}"], ["sft"]),
        (["deterministic=false"], ["deterministic"]),
        (["train.optimizer.muon={}"], ["train.optimizer.muon"]),
    ],
)
def test_settings_the_checkpoint_depends_on_are_named_one_by_one(overrides: list[str], paths: list[str]):
    assert differences(*overrides) == paths


def test_a_critic_keeps_its_optimizer_and_may_have_another_learning_rate():
    before = load([DEMO, "algorithm=ppo", "critic.optimizer.lr=1e-3"])
    for override, paths in (("critic.optimizer.muon={}", ["critic.optimizer.muon"]), ("critic.optimizer.lr=1e-4", [])):
        now = load([DEMO, "algorithm=ppo", "critic.optimizer.lr=1e-3", override])
        assert [problem.path for problem in resume_differences(to_yaml(before), now)] == paths
    its_own = load([DEMO, "algorithm=ppo", "critic.optimizer.lr=1e-3", "critic.optimizer.muon={}"])
    (problem,) = resume_differences(to_yaml(load([DEMO, "algorithm=ppo"])), its_own)
    assert problem.path == "critic.optimizer" and problem.fix.startswith("critic.optimizer=null,")


def test_a_fix_can_be_typed():
    old = load([DEMO, "train.optimizer.muon={}"])
    (problem,) = resume_differences(to_yaml(old), load([DEMO]))
    typed = problem.fix.partition(", or another")[0]
    assert load([DEMO, typed]).train.optimizer == old.train.optimizer


def test_the_fix_of_a_name_that_was_not_there_is_to_leave_it_out():
    changed = ["recipe=grpo-tiny-add-1n2g-sync", "data.chat_template_kwargs={enable_thinking: false}"]
    (problem,) = resume_differences(to_yaml(load(changed[:1])), load(changed))
    assert problem.fix.startswith("leave data.chat_template_kwargs.enable_thinking out (~data.chat_template_kwargs.enable_thinking ")


def test_the_day_of_a_template_may_be_given_later_and_then_stays():
    without = "recipe=grpo-tiny-add-1n2g-sync"
    given = [without, "data.template_date=2024-02-29"]
    assert resume_differences(to_yaml(load([without])), load(given)) == []
    for now in ([without], [without, "data.template_date=2024-03-01"]):
        (problem,) = resume_differences(to_yaml(load(given)), load(now))
        assert problem.path == "data.template_date" and problem.fix.startswith("data.template_date=2024-02-29,")


def test_a_problem_says_the_old_value_and_the_reason():
    (problem,) = resume_differences(to_yaml(load([DEMO])), load([DEMO, "seed=1"]))
    assert "was 0" in problem.rule
    assert problem.reason == FIXED["seed"]
    assert "seed=0" in problem.fix


def test_another_kind_of_data_names_the_settings_of_both(tmp_path):
    config = load([DEMO, "~data", "data={kind:files,files:[a.jsonl],max_prompt_tokens:16}"])
    paths = {problem.path for problem in resume_differences(to_yaml(load([DEMO])), config)}
    assert {"data.kind", "data.files", "data.task"} <= paths


def test_a_saved_file_that_is_no_configuration_is_an_error():
    with pytest.raises(ConfigError):
        resume_differences("name: 3\n", load([DEMO]))
