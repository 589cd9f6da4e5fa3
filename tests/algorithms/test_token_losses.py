"""Per-token losses and KL estimators against scalar arithmetic."""

import math
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.algorithms.kl import kl_estimate, kl_k3
from moerl.algorithms.kl_formulas import KLEstimator, kl_values
from moerl.algorithms.token_losses import _LOSSES, clipped_surrogate
from moerl.algorithms.token_selection import selected_loss
from moerl.config.schema.custom_part import CustomPart
from moerl.config.schema.loss_config import ObjectiveConfig, PPOClip

LOGP = st.floats(-60, 0)


def test_every_objective_has_a_loss():
    """One that needs the whole mini-batch among those that pick tokens of it, every other in the table."""
    kinds = set(get_args(get_args(ObjectiveConfig)[0])) - {CustomPart}
    picking = set(get_args(get_type_hints(selected_loss)["config"]))
    assert picking == {kind for kind in kinds if "whole_minibatch" in kind.needs}
    assert set(_LOSSES) == kinds - picking


def scalar_ppo(logp, old, advantage, low, high, dual):
    """Loss, slope in logp, and whether clipped; written from the paper's cases."""
    d = logp - old
    ratio = math.exp(min(max(d, -20), 20))
    slope = -advantage * ratio if abs(d) <= 20 else 0.0
    loss, clipped = -advantage * ratio, False
    if (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low):
        loss, slope, clipped = -advantage * (1 + high if advantage > 0 else 1 - low), 0.0, True
    if dual is not None and advantage < 0 and ratio > dual:
        loss, slope = -advantage * dual, 0.0  # told apart
    return loss, slope, clipped


def ppo_clip(logp, old, advantage, *, clip_low, clip_high, dual_clip):
    config = PPOClip(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    found = clipped_surrogate(config, (logp - old).clamp(-20, 20).exp(), advantage)
    return found.loss_T, found.clipped_T


def tensor(value, requires_grad=False):
    return torch.tensor([value], dtype=torch.float64, requires_grad=requires_grad)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    LOGP,
    st.one_of(st.floats(-1, 1), st.floats(-60, 60)),
    st.floats(-3, 3),
    st.sampled_from([(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.5, 3.0), (0.2, 0.2, 1.5)]),
)
def test_ppo_clip_agrees_with_its_cases_in_value_slope_and_clip(logp_value, shift, advantage, bounds):
    low, high, dual = bounds
    logp = tensor(logp_value, requires_grad=True)
    loss, clipped = ppo_clip(logp, tensor(logp_value + shift), tensor(advantage), clip_low=low, clip_high=high, dual_clip=dual)
    loss.sum().backward()
    expected_loss, expected_slope, expected_clipped = scalar_ppo(logp_value, logp_value + shift, advantage, low, high, dual)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-9, abs=1e-12)
    assert logp.grad.item() == pytest.approx(expected_slope, rel=1e-9, abs=1e-12)
    assert clipped.item() == expected_clipped


@pytest.mark.parametrize("advantage", [-2.0, 0.0, 1.5])
def test_on_policy_the_gradient_is_the_policy_gradient_and_nothing_is_clipped(advantage):
    logp = tensor(-1.3, requires_grad=True)
    loss, clipped = ppo_clip(logp, logp.detach(), tensor(advantage), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    loss.sum().backward()
    assert (loss.item(), logp.grad.item(), clipped.item()) == (-advantage, -advantage, False)


@pytest.mark.parametrize("d", [-1000.0, 1000.0])
def test_absurd_log_probs_stay_finite(d):
    logp = tensor(d, requires_grad=True)
    loss, _ = ppo_clip(logp, tensor(0.0), tensor(-1.0), clip_low=0.2, clip_high=0.2, dual_clip=None)
    (loss + kl_k3(logp, tensor(0.0))).sum().backward()
    assert math.isfinite(loss.item())
    assert loss.item() <= math.exp(20) * (1 + 1e-12)
    assert math.isfinite(logp.grad.item())


@settings(derandomize=True, deadline=None)
@given(st.floats(-3, 3))
def test_k3_agrees_with_its_formula(d):
    logp, other = tensor(-1.0), tensor(-1.0 - d)
    d = (logp - other).item()
    assert kl_k3(logp, other).item() == pytest.approx(min(math.exp(-d) + d - 1, 10), abs=1e-14)


def test_k3_averages_to_the_divergence():
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = (p * (p.log() - q.log())).sum()
    torch.testing.assert_close((p * kl_k3(p.log(), q.log())).sum(), exact)


def test_k3_is_exactly_zero_at_equality_and_accurate_near_it_in_float32():
    logp = torch.tensor([-1.0, -1.0])
    other = torch.tensor([-1.0, -1.0001])
    d = (logp - other)[1].item()
    zero, small = kl_k3(logp, other).tolist()
    assert zero == 0
    assert small == pytest.approx(d * d / 2, rel=1e-2)


@pytest.mark.parametrize(("d", "value"), [(-3.0, 10.0), (-100.0, 10.0), (5.0, math.exp(-5) + 4), (100.0, 10.0)])
def test_k3_is_limited_to_ten(d, value):
    assert kl_k3(tensor(d), tensor(0.0)).item() == pytest.approx(value)


@pytest.mark.parametrize("estimator", get_args(KLEstimator))
@given(st.lists(st.tuples(LOGP, LOGP), min_size=1, max_size=8))
def test_the_drivers_kl_of_a_reward_is_the_value_of_the_ranks_estimate(estimator, pairs):
    """Where nothing was updated since the old policy; beyond both clamps too."""
    logp_N, other_logp_N = np.array(pairs, dtype=np.float32).T
    expected_N = kl_estimate(estimator, *map(torch.from_numpy, (logp_N.copy(), other_logp_N.copy())), torch.ones(len(pairs)))
    np.testing.assert_allclose(kl_values(estimator, logp_N, other_logp_N), expected_N.numpy(), rtol=1e-5, atol=1e-6)
