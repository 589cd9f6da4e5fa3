"""Which groups and samples count, and what credit each sample gets."""

import math
import pickle
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_here import stored_here

from moerl.algorithms.algorithm import build_algorithm
from moerl.config.algorithm_settings import algorithm as settings_of
from moerl.config.compose import options
from moerl.types.completion import Completion, VersionSpan
from moerl.types.groups import Group, Prompt, Sample, Score
from moerl.types.stats import StepStats

LIMIT = 20
REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=16)


def make_group(rewards, *, lengths=None, truncated=(), errors=()):
    """`truncated` and `errors`: indices of samples that ended by length or could not be scored."""
    samples = []
    for i, reward in enumerate(rewards):
        length = 3 if lengths is None else lengths[i]
        completion = Completion(
            request_id=str(i),
            token_ids=(7,) * length,
            logprobs=(-0.5,) * length,
            spans=(VersionSpan(version=0, num_tokens=length),),
            finish_reason="length" if i in truncated else "stop",
        )
        score = Score(reward=reward, error="verifier timed out" if i in errors else None)
        samples.append(Sample(completion=stored_here((1, 2), completion), score=score))
    prompt = Prompt(index=0, token_ids=(1, 2), text="", data_source="test", ground_truth="")
    return Group(prompt=prompt, samples=tuple(samples))


def build(name, **settings):
    return build_algorithm(settings_of(name, *(f"{key}={value}" for key, value in settings.items())), LIMIT)


def grpo(**settings):
    return build("grpo", **settings)


def dapo(**settings):
    return build("dapo", **{"overlong": "none", **settings})


def credit(algorithm, group):
    """Of the samples in the mask."""
    return algorithm.credit(algorithm.scored_step([group])).advantages_S


@settings(derandomize=True, deadline=None)
@given(REWARDS)
def test_grpo_credit_is_the_centered_reward_over_the_unbiased_std(rewards):
    expected = [0.0] * len(rewards)
    if len(rewards) >= 2:
        mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
        expected = [(reward - mean) / (std + 1e-6) for reward in rewards]
    np.testing.assert_allclose(credit(grpo(), make_group(rewards)), expected, rtol=1e-7, atol=1e-7)


def test_a_known_group_gets_known_credit():
    size = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    np.testing.assert_allclose(credit(grpo(), make_group([1, 0, 0, 1])), [size, -size, -size, size], rtol=1e-12)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.3, 1e6])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero_credit(reward, size):
    assert credit(grpo(), make_group([reward] * size)).tolist() == [0.0] * size


def test_a_group_without_samples_gets_no_credit():
    group = make_group([])
    assert credit(grpo(), group).shape == (0,)
    assert not dapo().keeps_group(group)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=2, max_size=8), st.data())
def test_credit_does_not_depend_on_the_order_of_samples(rewards, data):
    order = data.draw(st.permutations(range(len(rewards))))
    permuted = credit(grpo(), make_group([rewards[i] for i in order]))
    np.testing.assert_allclose(permuted, credit(grpo(), make_group(rewards))[list(order)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize("algorithm", [grpo(), dapo(overlong="mask"), dapo(overlong="penalty", overlong_buffer=4)])
def test_the_reward_of_a_sample_that_could_not_be_scored_changes_nothing(algorithm, poison):
    group = make_group([1, poison, 0, 0.5], errors={1})
    without = make_group([1, 0, 0.5])
    assert algorithm.sample_mask(group).tolist() == [True, False, True, True]
    assert credit(algorithm, group).tolist() == credit(algorithm, without).tolist()


@pytest.mark.parametrize("poison", [math.nan, 0.0, 5.0])
def test_overlong_mask_takes_truncated_samples_out_of_loss_and_baseline(poison):
    algorithm = dapo(overlong="mask")
    group = make_group([1, poison, 0], truncated={1})
    assert algorithm.sample_mask(group).tolist() == [True, False, True]
    assert credit(algorithm, group).tolist() == credit(algorithm, make_group([1, 0])).tolist()


def test_a_group_that_loses_all_but_one_sample_gets_no_credit():
    assert credit(grpo(), make_group([1, 0, 0], errors={1, 2})).tolist() == [0]


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0), (16, 0), (17, -0.25), (18, -0.5), (19, -0.75), (20, -1)], ids=lambda value: str(value)
)
def test_overlong_penalty_falls_linearly_over_the_buffer(length, penalty):
    algorithm = dapo(overlong="penalty", overlong_buffer=4)
    assert algorithm.rewards(make_group([1.0, 0.0], lengths=[length, 1])).tolist() == [1 + penalty, 0]


def test_rewards_of_a_step_are_whitened_over_all_of_its_samples():
    groups = [make_group([1.0, 0.0, math.nan], errors={2}), make_group([3.0, 1.0, 2.0])]
    step = build("reinforce_pp", whiten_rewards="true").scored_step(groups)
    mean, std = 7 / 5, statistics.stdev([1, 0, 3, 1, 2])
    assert step.rewards_S.tolist() == pytest.approx([(reward - mean) / std for reward in (1, 0, 3, 1, 2)])
    assert step.group_S.tolist() == [0, 0, 1, 1, 1]


def test_a_truncated_completion_gets_the_whole_penalty_even_below_the_limit():
    algorithm = dapo(overlong="penalty", overlong_buffer=4)
    assert algorithm.rewards(make_group([1.0, 0.0], lengths=[5, 5], truncated={0})).tolist() == [0, 0]


def test_without_overlong_handling_length_does_not_matter():
    algorithm, group = dapo(overlong="none"), make_group([1.0, 0.0], lengths=[20, 1], truncated={0})
    assert algorithm.rewards(group).tolist() == [1, 0]
    assert algorithm.sample_mask(group).all()


@pytest.mark.parametrize("rewards", [[0, 0, 0], [1, 1], [0.3, 0.3, 0.3], [2]])
def test_dynamic_sampling_drops_groups_with_equal_rewards(rewards):
    assert not dapo().keeps_group(make_group(rewards))
    assert grpo().keeps_group(make_group(rewards))


def test_dynamic_sampling_keeps_groups_with_different_rewards():
    assert dapo().keeps_group(make_group([0, 0, 1]))


def test_dynamic_sampling_looks_at_rewards_before_shaping():
    algorithm = dapo(overlong="penalty", overlong_buffer=4)
    all_right_one_long = make_group([1, 1, 1], lengths=[3, 3, 20])
    assert len(set(algorithm.rewards(all_right_one_long).tolist())) == 2
    assert not algorithm.keeps_group(all_right_one_long)


def test_dynamic_sampling_ignores_samples_outside_the_mask():
    group = make_group([1, 1, 0, math.nan], truncated={2}, errors={3})
    assert not dapo(overlong="mask").keeps_group(group)
    assert dapo(overlong="none").keeps_group(group)
    assert not dapo(overlong="mask").keeps_group(make_group([1, 0], truncated={0, 1}))


def test_algorithms_declare_what_a_step_must_bring():
    assert grpo().config.needs == frozenset()
    assert grpo(kl_coefficient=0.1).loss.uses_reference
    assert grpo(kl_coefficient=0.1, kl_in="reward").config.needs == {"reference", "old_logprobs"}
    assert build("remax").config.needs == {"greedy_sample"}
    assert build("m2po").config.needs == {"whole_minibatch"}
    assert (grpo().config.max_attempts, dapo(max_attempts=5).config.max_attempts) == (1, 5)


@pytest.mark.parametrize("name", options("algorithm"))
def test_losses_travel_pickled(name):
    loss = build(name, fixed_length=8).loss if name == "dr_grpo" else build(name).loss
    assert pickle.loads(pickle.dumps(loss)) == loss


def stats_of(kl, **changes):
    fields = dict.fromkeys(("grad_norm", "learning_rate", "entropy", "clip_fraction", "mismatch_mean", "mismatch_max", "mismatch_kl"), 0.0)
    more = {"padding_fraction": 0.0, "rank_imbalance": 1.0, "round_imbalance": 1.0, "learning_rate": 1e-3}
    return StepStats(loss=0.0, num_tokens=1, kl_old=0.0, kl_reference=kl, **fields | more | changes)


def test_an_adaptive_kl_follows_its_target_and_is_saved_with_a_checkpoint():
    algorithm, groups = grpo(kl_coefficient=0.1, kl_target=0.02, kl_horizon=100), [make_group([0.0] * 10)]
    after = algorithm.after_step(stats_of(0.04), groups)
    assert after.loss.kl_coefficient == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))
    assert algorithm.after_step(stats_of(0.021), groups).kl_coefficient == pytest.approx(0.1 * (1 + 0.05 * 10 / 100))
    assert algorithm.resumed(after.state()) == after
    in_reward = grpo(kl_coefficient=0.1, kl_in="reward", kl_target=0.02, kl_horizon=100).after_step(stats_of(0.04), groups)
    assert (in_reward.kl_coefficient, in_reward.loss.kl_coefficient) == (after.kl_coefficient, 0)
    assert algorithm.resumed({}) == algorithm
    fixed = grpo(kl_coefficient=0.2)
    assert (fixed.after_step(stats_of(0.04), groups), fixed.state(), fixed.resumed(after.state())) == (fixed, {}, fixed)


def test_an_adaptive_kl_follows_no_step_that_changed_nothing():
    algorithm = grpo(kl_coefficient=0.1, kl_target=0.02, kl_horizon=4)
    assert algorithm.after_step(stats_of(0.0), [make_group([0.0] * 10)]).kl_coefficient == pytest.approx(0.05)
    for stats in (stats_of(math.nan), stats_of(0.04, skipped_updates=("rank 0",)), stats_of(None), stats_of(0.0, learning_rate=0.0)):
        assert algorithm.after_step(stats, [make_group([0.0])]) == algorithm


def test_a_group_without_its_baseline_is_not_trained_on():
    remax = build("remax")
    group = make_group([1, 0])
    assert not remax.sample_mask(group).any()
    assert remax.sample_mask(replace(group, greedy=Score(reward=0.5))).all()


def test_rewards_that_differ_by_rounding_are_equal():
    assert not dapo().keeps_group(make_group([0.1 + 0.2, 0.3]))
    assert credit(grpo(), make_group([0.1 + 0.2, 0.3])).tolist() == [0, 0]
