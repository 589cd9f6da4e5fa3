import pickle

import pytest

from moerl.observe.guards import check_finite, check_first_step, check_trained
from moerl.types.errors import GuardError

AGREED = dict(limit=1e-4, own_old_logprobs=True, fresh=True)


SKIPPED = ("rank 3, micro-batch 1, samples 7: loss is not finite",)


def test_an_update_that_was_not_applied_stops_the_run_and_says_where(make_stats):
    with pytest.raises(GuardError, match=r"step 7: .*rank 3, micro-batch 1, samples 7.*step before[\s\S]*on_nonfinite=skip"):
        check_finite(make_stats(loss=float("nan"), skipped_updates=SKIPPED), step=7, on_nonfinite="stop")


def test_or_is_passed_over_with_a_warning(make_stats, caplog):
    check_finite(make_stats(loss=float("nan"), skipped_updates=SKIPPED), step=7, on_nonfinite="skip")
    assert "step 7" in caplog.text
    assert SKIPPED[0] in caplog.text


def test_finite_steps_pass(make_stats):
    check_finite(make_stats(loss=-3.0, grad_norm=0.0), step=7, on_nonfinite="stop")


def test_agreement_passes(make_stats):
    check_first_step(make_stats(mismatch_mean=1e-4, first_kl_old=0.0, kl_reference=0.0), **AGREED)


@pytest.mark.parametrize("mean", [1.1e-4, float("nan")])
def test_a_mismatch_over_the_limit_names_numbers_and_causes(make_stats, mean):
    with pytest.raises(GuardError, match=r"max 0\.5.*limit = 0\.0001[\s\S]*precision[\s\S]*temperature[\s\S]*stale[\s\S]*template"):
        check_first_step(make_stats(mismatch_mean=mean, mismatch_max=0.5), **AGREED)


def test_a_mismatch_over_the_limit_is_told_with_the_tokens_it_is_of_and_not_those_of_later_mini_batches(make_stats):
    with pytest.raises(GuardError, match="KL 1e-09, 16 tokens"):
        check_first_step(make_stats(mismatch_mean=0.5, num_compared=16, num_tokens=32), **AGREED)


@pytest.mark.parametrize("value", [1e-12, float("nan")])
def test_own_old_logprobs_must_agree_to_the_last_bit(make_stats, value):
    with pytest.raises(GuardError, match="kl_old"):
        check_first_step(make_stats(first_kl_old=value), **AGREED)
    check_first_step(make_stats(first_kl_old=value), **{**AGREED, "own_old_logprobs": False})


def test_the_reference_is_the_policy_only_in_a_fresh_run(make_stats):
    with pytest.raises(GuardError, match="kl_reference"):
        check_first_step(make_stats(kl_reference=1e-9), **AGREED)
    check_first_step(make_stats(kl_reference=1e-9), **{**AGREED, "fresh": False})
    check_first_step(make_stats(kl_reference=None), **AGREED)


def test_a_guard_error_reaches_another_process_whole(make_stats):
    with pytest.raises(GuardError) as caught:
        check_finite(make_stats(skipped_updates=SKIPPED), step=1, on_nonfinite="stop")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_step_with_a_mini_batch_that_was_rejected_whole_stops_the_run(make_stats):
    check_trained(make_stats(num_tokens=3, correction_dropped=0.5), step=2)
    with pytest.raises(GuardError, match=r"(?s)step 2: corrections took every token out of 1 mini-batch.*widen low and high"):
        check_trained(make_stats(num_tokens=3, correction_dropped=0.5, empty_updates=1), step=2)
