"""The learning rate of each step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.config.schema.train_config import OptimizerConfig
from moerl.train.optimizer.learning_rates import learning_rate


def rates(num_steps, **settings):
    return [learning_rate(step, OptimizerConfig(**settings), num_steps) for step in range(num_steps + 2)]


def test_warm_up_rises_linearly_to_the_full_rate():
    assert rates(6, lr=1.0, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert rates(3, lr=0.5) == [0.5] * 5


def test_linear_decay_runs_from_the_end_of_the_warm_up_to_the_last_step():
    assert rates(6, lr=1.0, warmup_steps=2, decay="linear", min_lr=0.2) == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_decay_is_half_way_in_the_middle_and_ends_at_the_minimum():
    cosine = rates(4, lr=1.0, decay="cosine", min_lr=0.1)
    assert cosine == pytest.approx([1, 0.1 + 0.9 * (1 + 2**-0.5) / 2, 0.55, 0.1 + 0.9 * (1 - 2**-0.5) / 2, 0.1, 0.1])


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_a_run_shorter_than_its_warm_up_only_warms_up(decay):
    assert rates(2, lr=1.0, warmup_steps=8, decay=decay)[:2] == [0.125, 0.25]


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 50), st.sampled_from(["constant", "linear", "cosine"]), st.floats(0, 1e-3))
def test_the_rate_stays_between_its_bounds_and_never_rises_after_the_warm_up(step, num_steps, warmup, decay, min_lr):
    config = OptimizerConfig(lr=1e-3, warmup_steps=warmup, decay=decay, min_lr=min_lr)
    now, later = learning_rate(step, config, num_steps), learning_rate(step + 1, config, num_steps)
    assert 0 < now <= 1e-3 * (1 + 1e-12) or (min_lr == 0 and now == 0)
    if step >= warmup:
        assert now >= later * (1 - 1e-12)
        assert later >= min(min_lr, 1e-3) * (1 - 1e-12)
