"""Communication beside computation changes no number, and nobody reads parameters that are still to be gathered."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from engine_cases import LAYOUTS, random_batch, settings
from engine_jobs import train
from engine_ranks import run_ranks
from memory_jobs import buckets, load_and_continue, save_and_continue, with_train
from test_layouts import assert_same_training

from moerl.config.schema.layout import Layout

GRADS = {"overlap_grad_reduce": True, "overlap_bucket_size": 3000}
BOTH = GRADS | {"overlap_param_gather": True}


@pytest.fixture(scope="module")
def one_process(checkpoints):
    """By model."""

    @cache
    def trained(model):
        return run_ranks(train, 1, settings(checkpoints[model], Layout(), uses_reference=True), random_batch(with_servers=True))

    return trained


@pytest.mark.parametrize("overlap", [GRADS, BOTH], ids=["gradients", "both"])
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("qwen3_moe", "dp2"),
        ("untied-qwen3", "dp2"),
        ("qwen3_moe", "tp2-ep2-dp2"),
        ("qwen3_moe", "pp2-dp2"),
        pytest.param("qwen3_moe", "pp2-vpp2-dp2", marks=pytest.mark.matrix),
    ],
)
def test_overlapped_communication_equals_one_process(model, name, overlap, checkpoints, one_process):
    """Log-probs, reference swap, two updates a step and export, each reading what the update before it left. Some models have an output
    layer of their own, and some a copy of the embedding on the last stage."""
    layout = {**LAYOUTS, "pp2-dp2": Layout(ranks=4, pp=2), "pp2-vpp2-dp2": Layout(ranks=4, pp=2, vpp=2)}[name]
    chosen = settings(checkpoints[model], layout, uses_reference=True)
    assert_same_training(run_ranks(train, layout.ranks, with_train(chosen, **overlap), random_batch(with_servers=True)), one_process(model))


def test_there_is_more_than_one_bucket_to_overlap(checkpoints):
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS["dp2"])
    assert run_ranks(buckets, 2, chosen) == 1
    assert run_ranks(buckets, 2, with_train(chosen, **BOTH)) > 5


def test_a_checkpoint_saved_before_the_gather_holds_the_updated_parameters(checkpoints, tmp_path):
    """And of every bucket the states of its own parameters."""
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS["dp2"])
    straight, again = run_ranks(save_and_continue, 2, with_train(chosen, **BOTH), random_batch(), tmp_path, False)
    assert straight[0] == again[0]
    np.testing.assert_array_equal(straight[1], again[1])
    elsewhere = run_ranks(load_and_continue, 2, chosen, random_batch(), tmp_path)
    np.testing.assert_allclose(elsewhere[1], straight[1], atol=1e-5, rtol=0)


def test_the_samples_of_a_loss_that_is_not_finite_are_named_with_overlap_too(checkpoints):
    batch = random_batch()
    advantages_T = batch.advantages_T.copy()
    advantages_T[batch.offsets[4] - 1] = np.nan
    chosen = with_train(settings(checkpoints["qwen3_moe"], LAYOUTS["dp2"]), **BOTH)
    result = run_ranks(train, 2, chosen, replace(batch, advantages_T=advantages_T), 2, 1)
    for step in result.steps:
        assert "samples 3:" in step.skipped_updates[0]
    np.testing.assert_array_equal(result.after_T, result.before_T)
