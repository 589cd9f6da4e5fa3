import pickle

import pytest

from moerl.observe.guards import check_finite, check_first_step
from moerl.types import GuardError

AGREED = dict(limit=1e-4, on_policy=True, own_old_logprobs=True, fresh=True)


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_step_without_a_number_stops_the_run(make_stats, name, value):
    with pytest.raises(GuardError, match=f"step 7: {name} = {value}"):
        check_finite(make_stats(**{name: value}), step=7)


def test_finite_steps_pass(make_stats):
    check_finite(make_stats(loss=-3.0, grad_norm=0.0), step=7)


def test_agreement_passes(make_stats):
    check_first_step(make_stats(mismatch_mean=1e-4, kl_old=0.0, kl_reference=0.0), **AGREED)


@pytest.mark.parametrize("mean", [1.1e-4, float("nan")])
def test_a_mismatch_over_the_limit_names_numbers_and_causes(make_stats, mean):
    with pytest.raises(GuardError, match=r"max 0\.5.*limit = 0\.0001[\s\S]*precision[\s\S]*temperature[\s\S]*stale[\s\S]*template"):
        check_first_step(make_stats(mismatch_mean=mean, mismatch_max=0.5), **AGREED)


def test_samples_of_older_weights_may_differ(make_stats):
    check_first_step(make_stats(mismatch_mean=0.5), **{**AGREED, "on_policy": False})


@pytest.mark.parametrize("value", [1e-12, float("nan")])
def test_own_old_logprobs_must_agree_to_the_last_bit(make_stats, value):
    with pytest.raises(GuardError, match="kl_old"):
        check_first_step(make_stats(kl_old=value), **AGREED)
    check_first_step(make_stats(kl_old=value), **{**AGREED, "own_old_logprobs": False})


def test_the_reference_is_the_policy_only_in_a_fresh_run(make_stats):
    with pytest.raises(GuardError, match="kl_reference"):
        check_first_step(make_stats(kl_reference=1e-9), **AGREED)
    check_first_step(make_stats(kl_reference=1e-9), **{**AGREED, "fresh": False})
    check_first_step(make_stats(kl_reference=None), **AGREED)


def test_a_guard_error_reaches_another_process_whole(make_stats):
    with pytest.raises(GuardError) as caught:
        check_finite(make_stats(loss=float("nan")), step=1)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
