"""Training under a layout gives the statistics, weights and reference of one process; checkpoints move between layouts."""

from importlib.metadata import version

import numpy as np
import pytest
from engine_cases import DENSE_LAYOUTS, LAYOUTS, random_batch, settings
from engine_jobs import first_step, first_step_unpatched, train
from engine_ranks import run_ranks

from moerl.config.schema.layout import Layout

STATISTICS = ("loss", "grad_norm", "entropy", "kl_old", "kl_reference", "clip_fraction", "mismatch_mean", "mismatch_max", "mismatch_kl")


@pytest.fixture(scope="module")
def one_process(checkpoints):
    """Training runs of one process by checkpoint."""
    return {
        name: run_ranks(train, 1, settings(directory, Layout(), uses_reference=True), random_batch(with_servers=True))
        for name, directory in checkpoints.items()
    }


def assert_same_training(result, expected):
    np.testing.assert_allclose(result.before_T, expected.before_T, atol=1e-5, rtol=0)
    np.testing.assert_allclose(result.after_T, expected.after_T, atol=1e-5, rtol=0)
    for step, wanted in zip(result.steps, expected.steps, strict=True):
        for name in STATISTICS:
            assert getattr(step, name) == pytest.approx(getattr(wanted, name), rel=1e-5, abs=1e-8), name
        assert step.num_tokens == wanted.num_tokens
        for server, same in zip(step.server_mismatch, wanted.server_mismatch, strict=True):
            assert (server.num_tokens, server.mean) == (same.num_tokens, pytest.approx(same.mean, rel=1e-5))
    assert result.weights.keys() == expected.weights.keys()
    for name, weight in result.weights.items():
        np.testing.assert_allclose(weight, expected.weights[name], atol=2e-6, rtol=0, err_msg=name)


@pytest.fixture(scope="module")
def assert_equals_one_process(checkpoints, one_process):
    def check(name, layout, **options):
        result = run_ranks(
            train, layout.ranks, settings(checkpoints[name], layout, uses_reference=True, **options), random_batch(with_servers=True)
        )
        assert_same_training(result, one_process[name])
        # The reference is untouched by training, and asking for it leaves the policy untouched.
        np.testing.assert_array_equal(result.reference_T, result.before_T)

    return check


EIGHT_RANKS = [pytest.param(name, marks=pytest.mark.matrix) for name in ("tp2-ep2-dp2", "tp2-pp2-vpp2-cp2-ep4")]


@pytest.mark.parametrize("name", ["ep2", "tp2-etp2", "pp2", "cp2", *EIGHT_RANKS])
def test_a_mixture_of_experts_equals_one_process(name, assert_equals_one_process):
    assert_equals_one_process("qwen3_moe", LAYOUTS[name])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if LAYOUTS[name].ranks == 2 else pytest.mark.matrix) for name in DENSE_LAYOUTS]
)
def test_a_dense_model_equals_one_process(name, assert_equals_one_process):
    assert_equals_one_process("qwen3", LAYOUTS[name])


@pytest.mark.parametrize("name", ["untied-qwen3_moe", "untied-qwen3"])
def test_a_vocabulary_that_tensor_parallelism_does_not_divide_equals_one_process(name, assert_equals_one_process):
    assert_equals_one_process(name, LAYOUTS["tp2"])


@pytest.mark.parametrize("name", ["ep2", "tp2"])
def test_micro_batches_as_small_as_the_longest_sequence_equal_packed_ones(name, assert_equals_one_process):
    assert_equals_one_process("qwen3_moe", LAYOUTS[name], micro_batch_tokens=20)


def test_all_sequences_in_one_micro_batch_equal_several(assert_equals_one_process):
    assert_equals_one_process("qwen3_moe", Layout(), micro_batch_tokens=4096)


def test_training_moves_the_policy_away_from_the_reference(one_process):
    for result in one_process.values():
        assert np.abs(result.after_T - result.before_T).max() > 1e-2
        assert [step.kl_reference for step in result.steps] == sorted(step.kl_reference for step in result.steps)


@pytest.mark.parametrize("name", ["dp2", "ep2"])
def test_a_rank_without_sequences_changes_nothing(name, checkpoints):
    """One sequence for two data-parallel ranks: the other one runs padding and takes part in every collective."""
    batch = random_batch(num_sequences=1)
    expected = run_ranks(train, 1, settings(checkpoints["qwen3_moe"], Layout()), batch)
    result = run_ranks(train, 2, settings(checkpoints["qwen3_moe"], LAYOUTS[name]), batch)
    for step, wanted in zip(result.steps, expected.steps, strict=True):
        assert (step.loss, step.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-5)
        assert step.padding_fraction > 0
    np.testing.assert_allclose(result.after_T, expected.after_T, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("model", "name"), [("qwen3", "tp2"), ("qwen3", "pp2-vpp2"), ("qwen3_moe", "ep2"), ("qwen3_moe", "cp2-ep2")])
def test_bfloat16_stays_close_to_float32(model, name, checkpoints, one_process):
    """On average, and before training: a router that rounds to another expert changes a single token by much more, and the gradient by
    what one token is of its whole."""
    chosen = settings(checkpoints[model], LAYOUTS[name], dtype="bfloat16", uses_reference=True)
    result, expected = run_ranks(train, chosen.train.layout.ranks, chosen, random_batch()), one_process[model]
    assert np.abs(result.before_T - expected.before_T).mean() < (0.05 if model == "qwen3" else 0.1)
    step, wanted = result.steps[0], expected.steps[0]
    assert (step.loss, step.entropy) == pytest.approx((wanted.loss, wanted.entropy), rel=0.1)
    assert step.grad_norm == pytest.approx(wanted.grad_norm, rel=0.1 if model == "qwen3" else 0.25)


def test_replicated_experts_get_the_gradient_of_every_tensor_parallel_rank(checkpoints):
    """With ep = etp = 1 and tp = 2 Megatron 0.16 alone would leave each rank the gradient of its own tokens."""
    directory, batch = checkpoints["qwen3_moe"], random_batch()
    whole = run_ranks(first_step, 1, settings(directory, Layout()), batch)
    chosen = settings(directory, LAYOUTS["tp2"])
    assert run_ranks(first_step, 2, chosen, batch).grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    partial = run_ranks(first_step_unpatched, 2, chosen, batch)
    is_partial = abs(partial.grad_norm / whole.grad_norm - 1) > 1e-4
    assert is_partial == (version("megatron-core") < "0.17")
