"""FP8 settings that cannot run are refused with the sizes that stand in the way."""

import pytest

from moerl.check import load_checked
from moerl.types import ConfigError

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"


def problems(*overrides):
    with pytest.raises(ConfigError) as caught:
        load_checked([DEMO, *overrides])
    return caught.value.problems


def test_fp8_needs_bfloat16():
    [problem] = problems("train.fp8={recipe:blockwise}")
    assert (problem.path, problem.value) == ("train.dtype", "float32")


def test_every_width_that_the_recipe_does_not_divide_is_named():
    found = problems("train.fp8={recipe:mxfp8}", "train.dtype=bfloat16", "model.scratch.ffn_size=48", "model.scratch.hidden_size=144")
    assert [problem.rule.split("=")[0] for problem in found] == ["needs hidden_size", "needs moe_intermediate_size"]


def test_micro_batches_must_be_multiples_of_what_every_rank_needs():
    [problem] = problems("train.fp8={recipe:blockwise}", "train.dtype=bfloat16", "train.micro_batch_tokens=1000")
    assert problem.path == "train.micro_batch_tokens"
    assert problem.fix == "train.micro_batch_tokens=1008"


def test_layers_in_bfloat16_are_layers_of_the_model():
    [problem] = problems("train.fp8={recipe:blockwise,first_layers_bf16:5}", "train.dtype=bfloat16")
    assert "at most 4" in problem.rule


def test_the_recipes_of_a_layout_that_fits_are_accepted():
    for recipe in ("blockwise", "tensorwise", "mxfp8"):
        checked = load_checked([DEMO, f"train.fp8={{recipe:{recipe}}}", "train.dtype=bfloat16", "train.micro_batch_tokens=1024"])
        assert checked.train.token_multiple == (32 if recipe == "mxfp8" else 16)


def test_megatrons_own_names_are_refused():
    paths = {problem.path for problem in problems("train.megatron={fp8:e4m3,fp8_param:true}")}
    assert paths == {"train.megatron.fp8", "train.megatron.fp8_param"}
