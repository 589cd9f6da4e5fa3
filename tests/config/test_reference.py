"""The reference of settings: whole, the same on the terminal and on the page, and helpful about a key that is none."""

import dataclasses

import pytest
from docs_pages import settings_page

from moerl.config.load import load, to_plain
from moerl.config.reference import explanation, settings
from moerl.types.errors import ConfigError


def paths_of(plain, prefix=""):
    for name, value in plain.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from paths_of(value, f"{prefix}{name}.")


@pytest.mark.parametrize("recipe", ["grpo-tiny-add-1n2g-sync", "dapo-tiny-moe-1n2g-async"])
def test_every_setting_of_a_run_is_explained(recipe):
    for path in paths_of(to_plain(load([f"recipe={recipe}"]))):
        assert explanation(path), path


def test_the_page_holds_what_the_terminal_prints():
    page = settings_page().replace("\\", "")
    for setting in settings():
        text = explanation(setting.path)
        for line in setting.lines:
            assert f"    {line}\n" in text, setting.path
            assert line.replace("\\", "") in page, setting.path


def test_a_section_lists_its_settings_and_one_of_several_kinds_says_which_has_what():
    printed = explanation("data")
    assert [line for line in printed.splitlines() if line == "data.max_prompt_tokens"] == ["data.max_prompt_tokens"]
    assert "data.files\n    a list; must be given; only with data.kind=files\n" in printed
    assert "data.size\n    an integer > 0; default 1000; only with data.kind=gym or data.kind=tiny\n" in printed


def test_sections_in_a_list_have_their_settings_like_any_other():
    assert "algorithm.corrections.INDEX.kind\n    one of " in explanation("algorithm.corrections.0")
    assert "default 2.0; only with algorithm.corrections.INDEX.kind=tis\n" in explanation("algorithm.corrections.0.cap")
    assert explanation("kubernetes.volumes.INDEX.claim").endswith("of shared storage, as every pod mounts it.\n")
    assert "`algorithm.corrections.INDEX.normalized`" in settings_page()


@pytest.mark.parametrize(
    ("key", "above"),
    [
        ("network.variables.NCCL_IB_SL", "network.variables"),
        ("train.megatron.moe_permute_fusion", "train.megatron"),
        ("data.args.seed", "data.args"),
        ("train.optimizer.betas.1", "train.optimizer.betas"),
        ("slurm.pass_environment.0", "slurm.pass_environment"),
    ],
)
def test_what_a_user_names_is_explained_by_the_setting_that_takes_it(key, above):
    assert explanation(key) == explanation(above)


def test_without_a_key_the_sections_of_a_run_are_listed():
    assert {line for line in explanation("").splitlines() if not line.startswith(" ")} == {
        field.name for field in dataclasses.fields(load(["recipe=grpo-tiny-moe-1n2g-sync"]))
    }


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.layuot", "train.layout"),
        ("kl_coefficient", "algorithm.kl_coefficient"),
        ("reward.terms.answer.wieght", "reward.terms.NAME.weight"),
        ("nothing.of.this", "name one of those"),
        ("algorithm.corrections.cap", "algorithm.corrections.INDEX.cap"),
        ("train.dtype.x", "train.dtype has a value of its own"),
        ("rollout.over_sampling", "max_staleness=1"),
    ],
)
def test_a_key_that_is_none_gets_the_nearest_names(key, meant):
    with pytest.raises(ConfigError) as raised:
        explanation(key)
    assert f"KEY = '{key}': is not a setting" in str(raised.value)
    assert meant in str(raised.value)
