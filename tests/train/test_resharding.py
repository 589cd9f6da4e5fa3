"""A checkpoint continues under its own and under any other layout and dtype, with the optimizer's state."""

import numpy as np
import pytest
from checkpoint_jobs import load_and_continue, save_and_continue
from engine_cases import LAYOUTS, random_batch, settings
from engine_ranks import run_ranks

from moerl.config.layout import Layout


def assert_continues(result, expected):
    for step, wanted in zip(result.steps, expected.steps, strict=True):
        assert (step.loss, step.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-5)
    np.testing.assert_allclose(result.logprobs_T, expected.logprobs_T, atol=1e-5, rtol=0)
    assert result.weights.keys() == expected.weights.keys()
    for name, weight in result.weights.items():
        np.testing.assert_allclose(weight, expected.weights[name], atol=2e-6, rtol=0, err_msg=name)


@pytest.fixture(scope="module")
def saved(checkpoints, tmp_path_factory):
    """What a layout's ranks saved, once: (directory, how training went on, what each rank wrote)."""
    made = {}

    def get(name, model="qwen3_moe"):
        if (name, model) not in made:
            directory = tmp_path_factory.mktemp(name)
            chosen = settings(checkpoints[model], LAYOUTS[name])
            straight, again, written = run_ranks(save_and_continue, LAYOUTS[name].ranks, chosen, random_batch(), directory)
            assert again.steps == straight.steps  # bit by bit
            np.testing.assert_array_equal(again.logprobs_T, straight.logprobs_T)
            made[name, model] = directory, straight, written
        return made[name, model]

    return get


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp2-pp2-ep2-dp2", "ep2"),
        ("tp2-pp2-vpp2-cp2-ep4", "tp2-etp2"),
        ("pp2-vpp2", "one"),
        ("cp2", "tp2"),
        ("pp3-first1-last1", "pp2"),
        ("pp3-counted", "pp2-vpp2"),
        ("dp2", "tp2-etp2"),
        ("tp2-ep2", "ep4"),
    ],
)
def test_training_continues_under_another_layout(before, after, checkpoints, saved):
    directory, expected, _ = saved(before)
    layout = Layout() if after == "one" else LAYOUTS[after]
    assert_continues(run_ranks(load_and_continue, layout.ranks, settings(checkpoints["qwen3_moe"], layout), random_batch(), directory), expected)
