"""pass@k against every choice of k samples, standard errors, and what becomes of samples that could not be scored."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.evaluation.estimates import Estimate, Outcome, pass_at_k, result_of


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_one_that_passed(passed, data):
    k = data.draw(st.integers(1, len(passed)))
    choices = [any(chosen) for chosen in combinations(passed, k)]
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(np.mean(choices))


def test_pass_at_k_does_not_overflow():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


def outcome(reward=0.0, *, passed=False, length=3, truncated=False, error=None, **parts):
    return Outcome(reward=reward, passed=passed, length=length, truncated=truncated, error=error, parts=parts)


def test_the_standard_error_is_that_of_a_mean_over_prompts_however_many_samples_each_has():
    prompts = [[outcome(1.0, passed=True)] * 4, [outcome()] * 4, [outcome()] * 4, [outcome(1.0, passed=True)] * 4]
    result = result_of("sums", prompts, pass_at=(1, 2))
    assert result.reward == result.passes[1] == result.passes[2]
    assert result.reward.mean == 0.5
    assert result.reward.standard_error == pytest.approx(np.std([1, 0, 0, 1], ddof=1) / 2)
    assert result.reward.interval == pytest.approx((0.5 - 1.96 * 3**-0.5 / 2, 0.5 + 1.96 * 3**-0.5 / 2))


def test_one_prompt_has_no_standard_error():
    assert Estimate.over([0.25]) == Estimate(mean=0.25, standard_error=None)
    metrics = result_of("one", [[outcome()]], pass_at=(1,)).metrics()
    assert metrics["eval/one/pass@1"] == 0.0 and "eval/one/pass@1_error" not in metrics


def test_lengths_parts_truncation_and_samples_that_could_not_be_scored_are_counted():
    prompts = [
        [outcome(0.5, length=2, form=1.0), outcome(length=8, truncated=True)],
        [outcome(length=4, error="late"), outcome(error="late", form=0.0)],
    ]
    result = result_of("mixed", prompts, pass_at=())
    assert (result.num_prompts, result.samples, result.errors) == (2, 2, 2)
    assert (result.length_mean, result.truncated, result.reward.mean) == (17 / 4, 0.25, 0.125)
    assert result.parts == {"form": 0.5}
    assert result.plain()["reward"]["mean"] == 0.125
