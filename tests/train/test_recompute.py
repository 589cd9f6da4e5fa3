"""Activations computed again give the same numbers, are not kept, and cost a second forward pass."""

from importlib.metadata import version

import numpy as np
import pytest
from deepseek_cases import deepseek_settings, write_deepseek
from engine_cases import LAYOUTS, random_batch, settings
from engine_jobs import train
from engine_ranks import RankError, run_ranks
from memory_jobs import saved_bytes_and_forwards, with_train
from packaging.version import Version

from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import FullRecompute, SelectiveRecompute

WAYS = {
    "uniform1": FullRecompute(method="uniform", num_layers=1),
    "uniform2": FullRecompute(method="uniform", num_layers=2),
    "block1": FullRecompute(method="block", num_layers=1),
    **{name: SelectiveRecompute(modules=(name,)) for name in ("core_attn", "moe_act", "layernorm", "moe")},
    "many": SelectiveRecompute(modules=("core_attn", "layernorm", "moe_act")),
}
LAYOUT = {"one": Layout(), "tp2-ep2": LAYOUTS["tp2-ep2"], "pp2-vpp2": LAYOUTS["pp2-vpp2"]}


@pytest.fixture(scope="module")
def kept(checkpoints):
    """Training with every activation kept, by layout."""
    return {
        name: run_ranks(train, layout.ranks, settings(checkpoints["qwen3_moe"], layout), random_batch(), 2, 1)
        for name, layout in LAYOUT.items()
    }


@pytest.mark.parametrize(
    ("layout", "way"),
    [
        *(pytest.param("tp2-ep2", way, marks=[] if way == "many" else pytest.mark.matrix) for way in WAYS),
        ("pp2-vpp2", "uniform1"),
        ("pp2-vpp2", "many"),
        *(("one", way) for way in WAYS),
    ],
)
def test_recomputed_activations_change_no_number(layout, way, checkpoints, kept):
    chosen = with_train(settings(checkpoints["qwen3_moe"], LAYOUT[layout]), recompute=WAYS[way])
    result, expected = run_ranks(train, LAYOUT[layout].ranks, chosen, random_batch(), 2, 1), kept[layout]
    np.testing.assert_array_equal(result.before_T, expected.before_T)
    assert result.steps[0].loss == expected.steps[0].loss
    # Gradients of one tensor may be added up in another order.
    for step, wanted in zip(result.steps, expected.steps, strict=True):
        assert (step.loss, step.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-6)
    np.testing.assert_allclose(result.after_T, expected.after_T, atol=5e-6, rtol=0)


def test_a_dense_mlp_computed_again_changes_no_number(checkpoints):
    chosen = settings(checkpoints["qwen3"], LAYOUTS["tp2"])
    expected = run_ranks(train, 2, chosen, random_batch(), 2, 1)
    result = run_ranks(train, 2, with_train(chosen, recompute=SelectiveRecompute(modules=("mlp",))), random_batch(), 2, 1)
    np.testing.assert_array_equal(result.before_T, expected.before_T)
    assert result.steps[-1].grad_norm == pytest.approx(expected.steps[-1].grad_norm, rel=1e-6)


LATENT = {
    "mla_up_proj": SelectiveRecompute(modules=("mla_up_proj",)),
    "all modules": SelectiveRecompute(modules=("mla_up_proj", "layernorm", "core_attn", "mlp", "shared_experts", "moe_act")),
    "layers": FullRecompute(),
}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    return write_deepseek(tmp_path_factory.mktemp("deepseek"), "yarn")["yarn"]


@pytest.mark.parametrize("layout", ["one", pytest.param("tp2-ep2", marks=pytest.mark.matrix)])
def test_latent_attention_shared_experts_and_token_prediction_computed_again_change_no_number(layout, deepseek):
    chosen = deepseek_settings(deepseek, LAYOUT[layout], mtp_loss=0.3)
    expected = run_ranks(train, LAYOUT[layout].ranks, chosen, random_batch(), 2, 1)
    for name, way in LATENT.items():
        result = run_ranks(train, LAYOUT[layout].ranks, with_train(chosen, recompute=way), random_batch(), 2, 1)
        np.testing.assert_array_equal(result.before_T, expected.before_T, err_msg=name)
        for step, wanted in zip(result.steps, expected.steps, strict=True):
            assert (step.loss, step.grad_norm, step.mtp_loss) == pytest.approx(
                (wanted.loss, wanted.grad_norm, wanted.mtp_loss), rel=1e-5
            ), name


@pytest.mark.skipif(Version(version("megatron-core")) >= Version("0.19"), reason="this version of Megatron hands over tensors only")
def test_without_its_patch_token_prediction_of_packed_sequences_cannot_be_computed_again(deepseek):
    chosen = with_train(deepseek_settings(deepseek, Layout(), mtp_loss=0.3), recompute=FullRecompute())
    with pytest.raises(RankError, match="argument 10 is of type PackedSeqParams"):
        run_ranks(train, 1, chosen, random_batch(), 1, 1, without=["mtp_recompute"])


@pytest.mark.parametrize(
    ("way", "module", "more", "most"),
    [
        ("uniform1", "TransformerLayer", 4, 0.08),
        ("uniform2", "TransformerLayer", 4, 0.06),
        ("block1", "TransformerLayer", 1, 0.8),
        ("moe", "TEGroupedMLP", 4, 0.7),
        ("core_attn", "TEDotProductAttention", 4, 1.02),  # a fused kernel keeps no scores: its inputs are kept either way
        ("moe_act", "TEGroupedMLP", 0, 0.87),  # a function, not a module, runs again
        ("layernorm", "RMSNorm", 4, 0.96),
    ],
)
def test_recomputed_activations_are_not_kept_and_cost_a_second_forward(way, module, more, most, checkpoints):
    """Of a model of 4 layers: forward passes of `module` beside the first ones, and the share of the kept bytes that remains."""
    chosen = settings(checkpoints["qwen3_moe"], Layout())
    all_bytes, once = run_ranks(saved_bytes_and_forwards, 1, chosen, random_batch())
    kept_bytes, counts = run_ranks(saved_bytes_and_forwards, 1, with_train(chosen, recompute=WAYS[way]), random_batch())
    assert kept_bytes < most * all_bytes
    assert counts[module] == once[module] + more
