"""bfloat16 training keeps what bfloat16 alone would lose: master weights and gradient sums in float32."""

import fp8_training_jobs as jobs
import numpy as np
from engine_cases import random_batch, settings
from engine_ranks import run_ranks

from moerl.config.schema.layout import Layout


def test_updates_too_small_for_bfloat16_add_up_in_the_masters(checkpoints):
    """20 updates of 2e-5: each far below the distance of two bfloat16 values near 0.2, 1e-3."""
    kept = run_ranks(jobs.small_updates, 1, settings(checkpoints["qwen3"], Layout(), dtype="bfloat16"), random_batch(), 20, 2e-5)
    assert kept["is_float32"] == 1
    assert kept["largest_update"] < 4e-5
    assert kept["masters_moved"] > 0.8
    assert kept["parameters_are_rounded_masters"] == 1
    assert kept["parameters_moved"] > 0.2
    assert kept["bfloat16_alone_moved"] < kept["parameters_moved"] / 4


def test_gradients_of_many_micro_batches_are_added_in_float32(checkpoints):
    """Each micro-batch gives gradients that fit bfloat16; their sum does not, and equals the float32 sum bit by bit."""
    sums = run_ranks(jobs.accumulated, 1, settings(checkpoints["qwen3_moe"], Layout(), dtype="bfloat16"), random_batch())
    assert sums["dtype"] == "torch.float32"
    assert sums["pieces_fit_bfloat16"]
    assert sums["equal"]
    assert sums["differ_from_bfloat16"] > 0.5


def test_gradients_of_ranks_are_added_in_float32(checkpoints):
    """Two micro-batches on two ranks give bit by bit what they give one after the other on one; but for the output layer, here the
    embedding too, whose float32 sums over chunks of tokens are added in another order."""
    model, batch = checkpoints["qwen3_moe"], random_batch(num_sequences=4)
    plans = {2: [[[0, 2]], [[1, 3]]], 1: [[[0, 2], [1, 3]]]}
    on_two, on_one = (
        run_ranks(jobs.reduced_gradients, ranks, settings(model, Layout(ranks=ranks), dtype="bfloat16"), batch, plan)
        for ranks, plan in plans.items()
    )
    assert on_two.keys() == on_one.keys()
    for name, gradient in on_two.items():
        assert gradient.dtype == np.float32
        if "embedding" in name:
            np.testing.assert_allclose(gradient, on_one[name], rtol=1e-5, atol=1e-7)
        else:
            np.testing.assert_array_equal(gradient, on_one[name], err_msg=name)
