"""Every layout computes what one process computes, however the batch is cut into micro-batches, and so do three optimizer steps of one cut.

float32 shows what a run sees; in float64 rounding hides no error, and Adam, which divides by the gradient's size, enlarges none.
"""

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import LAYOUTS, random_batch, settings
from engine_ranks import run_ranks
from gate_jobs import Cut, cuts, measure

from moerl.config.schema.layout import Layout

NUM_SEQUENCES = 16
TRAINED = "packed-2"
"""The cut that optimizer steps are taken with: a step takes the gradients, which are equal for every cut."""
TOLERANCE = {"float32": 1e-5, "float64": 1e-11}
CLIPPED = 1e-9
"""Of weights after three steps: Megatron keeps the gradient norm, by which gradients are clipped, in float32."""


@pytest.fixture(scope="module")
def one_process(checkpoints):
    """By dtype and number of sequences: all of them in one micro-batch of one process."""
    whole = [Cut(name=str(count), num_sequences=count, count=1) for count in (1, 2, 4, 8, 16)]
    batch = random_batch(num_sequences=NUM_SEQUENCES)
    return {
        dtype: run_ranks(measure, 1, settings(checkpoints["qwen3_moe"], Layout(), dtype=dtype), batch, whole, _trained(dtype, "16"))
        for dtype in TOLERANCE
    }


def _trained(dtype, cut):
    return cut if dtype == "float64" else ""


def assert_close(result, expected, tolerance, name):
    """Relative to the largest entry of the tensor."""
    difference, size = np.abs(result - expected).max(), np.abs(expected).max()
    assert difference <= tolerance * size, f"{name}: off by {difference / size:.2e} of its largest entry"


def assert_equal(result, expected, tolerance):
    assert result.loss == pytest.approx(expected.loss, rel=tolerance)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=max(tolerance, 1e-6))  # Megatron sums it in float32
    assert_close(result.logprobs_T, expected.logprobs_T, tolerance, "log-probs")
    assert_close(result.entropy_T, expected.entropy_T, tolerance, "entropy")
    assert_tensors_equal(result.gradients, expected.gradients, tolerance, "gradients")


def assert_tensors_equal(tensors, wanted, tolerance, kind):
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        assert_close(tensor, wanted[name], tolerance, f"{kind} of {name}")


IN_FLOAT32 = ("pp2-vpp2", "cp2-ep2")
IN_FLOAT64 = {name for name, layout in LAYOUTS.items() if layout.ranks == 2}
"""What every change runs: each size alone and pairs on two ranks. In a matrix all layouts, in both."""
CASES = [
    pytest.param(name, dtype, marks=[] if name in (IN_FLOAT64 if dtype == "float64" else IN_FLOAT32) else [pytest.mark.matrix])
    for dtype in TOLERANCE
    for name in LAYOUTS
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_layout_equals_one_process_for_every_cut_into_micro_batches(name, dtype, one_process, checkpoints):
    layout, batch = LAYOUTS[name], random_batch(num_sequences=NUM_SEQUENCES)
    wanted = cuts(layout, NUM_SEQUENCES)
    chosen = settings(checkpoints["qwen3_moe"], layout, dtype=dtype)
    results = run_ranks(measure, layout.ranks, chosen, batch, wanted, _trained(dtype, TRAINED))
    for cut in wanted:
        assert_equal(results[cut.name], one_process[dtype][str(cut.num_sequences)], TOLERANCE[dtype])
    assert_tensors_equal(results[TRAINED].weights, one_process[dtype]["16"].weights, CLIPPED, "weights")
    assert bool(results[TRAINED].weights) == (dtype == "float64")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_fused_swiglu_computes_what_the_plain_one_does(dtype, one_process, checkpoints):
    """The one fusion that runs without a GPU. Its backward pass is written by hand."""
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS["ep2"], dtype=dtype)
    fused = replace(chosen, train=replace(chosen.train, megatron={"bias_activation_fusion": True}))
    wanted = [cut for cut in cuts(LAYOUTS["ep2"], NUM_SEQUENCES) if cut.name in (TRAINED, "single-1")]
    results = run_ranks(measure, 2, fused, random_batch(num_sequences=NUM_SEQUENCES), wanted, _trained(dtype, TRAINED))
    for cut in wanted:
        assert_equal(results[cut.name], one_process[dtype][str(cut.num_sequences)], TOLERANCE[dtype])
    assert_tensors_equal(results[TRAINED].weights, one_process[dtype]["16"].weights, CLIPPED, "weights")
