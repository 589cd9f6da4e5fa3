"""Plain arrays that an algorithm cannot be computed from are refused with what to give; the example of docs/algorithms.md runs."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest

import moerl
from moerl.config.algorithm_settings import algorithm, of_plain
from moerl.train.loss.algorithm_loss import TokenArrays, algorithm_loss
from moerl.types.errors import ConfigError

TOKENS = TokenArrays(mask=[[1, 1], [1, 0]], logprobs=[[-1.0, -2.0], [-1.0, 0]])


def config(kind="grpo", **settings):
    return of_plain({"advantage": {"kind": kind}, "objective": {"kind": "ppo_clip"}, **settings})


@pytest.mark.parametrize(
    ("settings", "tokens", "given", "said"),
    [
        ({}, TOKENS, {"rewards": [1.0, float("nan")]}, "rewards .nan.: must be finite"),
        ({}, TOKENS, {"groups": [0]}, "must be one number each"),
        ({}, TOKENS, {"rewards": [1.0, 0.0, 2.0], "groups": [0, 0, 0]}, "must be 2, one for each sequence"),
        ({"kind": "remax"}, TOKENS, {"greedy_rewards": [float("nan"), 0.0]}, "must be finite"),
        ({"kl_coefficient": 0.1}, TOKENS, {}, "reference_logprobs = None"),
        ({"entropy_bonus": 0.1}, TOKENS, {}, "entropy = None"),
        ({"normalize_by": "fixed_length"}, TOKENS, {}, "fixed_length = None"),
        ({"overlong": "penalty", "overlong_buffer": 2}, TOKENS, {}, "max_response_tokens must be given"),
        ({}, TokenArrays(mask=[[]], logprobs=[[]]), {}, "must have a token"),
        ({}, TOKENS, {"samples": [1, 0]}, "ascending"),
        ({}, TOKENS, {"samples": [0, 2]}, "must be a sample of 0 to 1"),
        ({}, TokenArrays(mask=[1, 1], logprobs=[0, 0]), {}, "with lengths"),
        ({}, TokenArrays(mask=[1, 1], logprobs=[0, 0], lengths=[1]), {}, "must add up to the 2 tokens"),
        ({}, TokenArrays(mask=[[1, 1]], logprobs=[0, 0]), {}, "must be .1, 2., the mask's"),
        ({"kind": "gae"}, TOKENS, {}, "values = None"),
        ({"kind": "prime"}, TOKENS, {}, "process_logprobs = None"),
        ({"kind": "remax"}, TOKENS, {}, "greedy_rewards = None"),
        ({"kl_coefficient": 0.1, "kl_in": "reward"}, TOKENS, {}, "reference_logprobs = None"),
        ({}, TokenArrays(mask=[[1, 1], [1, 0]], logprobs=[[0, 0], [0, 0]], versions=[[1, 1], [1, 1]]), {}, "version = None"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(settings, tokens, given, said):
    with pytest.raises(ValueError, match=said):
        algorithm_loss(config(**settings), tokens, **({"rewards": [1.0, 0.0], "groups": [0, 0]} | given))


def test_the_example_of_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    code = textwrap.dedent(re.search(r"^    import moerl\n((?:    .*\n|\n)+)", page, re.MULTILINE)[0])
    names = {}
    exec(code, names)
    result = names["result"]
    assert result.advantages.shape == result.gradient.shape == (2, 4)
    assert np.isfinite(result.loss) and result.metrics["num_tokens"] == 6
    assert moerl.algorithm("gspo", "kl_coefficient=0.01") == names["config"]


def test_settings_may_be_typed_plain_or_named():
    plain = {"advantage": {"kind": "grpo"}, "objective": {"kind": "ppo_clip"}}
    found = [algorithm_loss(given, TOKENS, rewards=[1.0, 0.5], groups=[0, 0]) for given in ("grpo", plain, algorithm("grpo"))]
    assert found[0].gradient.tolist() == found[1].gradient.tolist() == found[2].gradient.tolist()
    assert found[0].gradient.any()
    with pytest.raises(ConfigError, match="algorithm.objective.kind"):
        algorithm_loss({**plain, "objective": {"kind": "gspoo"}}, TOKENS, rewards=[1.0, 0.5], groups=[0, 0])


def test_a_batch_that_is_masked_whole_has_no_loss_and_no_gradient():
    result = algorithm_loss(config(), TokenArrays(mask=[[0, 0]], logprobs=[[-1.0, -2.0]]), rewards=[1.0], groups=[0])
    assert (result.loss, result.gradient.tolist(), result.metrics["num_tokens"]) == (0, [[0, 0]], 0)


def test_settings_that_are_wrong_are_named_all_at_once():
    with pytest.raises(ConfigError) as caught:
        algorithm("grpo", "objective.clip_low=2", "kl_in=both", "nonsense=1")
    paths = {problem.path for problem in caught.value.problems}
    assert paths == {"algorithm.objective.clip_low", "algorithm.kl_in", "algorithm.nonsense"}
    with pytest.raises(ConfigError, match="is not one of the algorithm files"):
        algorithm("vapo")
    with pytest.raises(ConfigError, match="fixed_length"):
        algorithm("dr_grpo")
    assert algorithm("dr_grpo", "fixed_length=8").fixed_length == 8
