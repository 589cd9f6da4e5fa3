"""DeepSeek-V3 in Megatron: transformers' numbers, the same under every layout, every bit of a checkpoint back."""

import json

import numpy as np
import pytest
import torch
from checkpoint_jobs import load_and_continue, save_and_continue
from deepseek_cases import deepseek_settings, require_megatron_for, slow, write_deepseek
from engine_cases import LAYOUTS, random_batch
from engine_jobs import export_to, first_step, new_engine, train
from engine_ranks import RankError, run_ranks
from safetensors.torch import load_file, save_file
from test_hf_parity import train_plainly

from megatron_patches import duplicated_linear
from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ScratchModel
from moerl.convert.conversion import Conversion, convert
from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.scratch_model import write_scratch_model

LAYOUTS = {"one": Layout(), **LAYOUTS}
ROUNDED = 1e-6
"""Between float64 runs: Megatron's router makes float32 numbers of its scores whatever the model's dtype."""


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """Directories of tiny DeepSeek-V3 checkpoints, by variant."""
    return write_deepseek(tmp_path_factory.mktemp("deepseek"))


# -- transformers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout"),
    [("plain", "one"), ("yarn", "one"), ("yarn-unscaled", "one"), ("odd", "one"), ("yarn", "tp2"), ("odd", "tp2")],
)
def test_training_equals_the_oracle(name, layout, deepseek):
    require_megatron_for(deepseek[name])
    chosen = deepseek_settings(deepseek[name], LAYOUTS[layout])
    result = run_ranks(train, chosen.train.layout.ranks, chosen, random_batch(), 1, 1)
    expected = train_plainly(chosen, random_batch(), 1, 1)
    np.testing.assert_allclose(result.before_T, expected.before_T, atol=2e-5, rtol=0)
    [step], [wanted] = result.steps, expected.steps
    assert (step.loss, step.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=1e-4, abs=1e-6)
    assert step.entropy == pytest.approx(wanted.entropy, rel=1e-5)
    for tensor_name, weight in expected.weights.items():
        np.testing.assert_allclose(result.weights[tensor_name], weight, atol=1e-5, rtol=0)


# -- layouts -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_process(deepseek):
    """Training runs of one process, by the weight of multi-token prediction."""
    return {
        mtp_loss: run_ranks(train, 1, deepseek_settings(deepseek["yarn"], Layout(), mtp_loss=mtp_loss, **EXACT), random_batch(), 2)
        for mtp_loss in (0.0, 0.3)
    }


EXACT = {"dtype": "float64", "uses_reference": True}
FAST = (("tp2-etp2", 0.0), ("tp2-ep2", 0.3), ("pp2", 0.3), ("cp2", 0.3))
CASES = [(name, mtp_loss) for name in LAYOUTS if name != "one" for mtp_loss in (0.0, 0.3)]


@pytest.mark.parametrize(("name", "mtp_loss"), [case if case in FAST else slow(*case) for case in CASES])
def test_a_layout_equals_one_process_with_and_without_multi_token_prediction(name, mtp_loss, deepseek, one_process):
    layout, expected = LAYOUTS[name], one_process[mtp_loss]
    result = run_ranks(train, layout.ranks, deepseek_settings(deepseek["yarn"], layout, mtp_loss=mtp_loss, **EXACT), random_batch(), 2)
    for kind in ("before_T", "after_T", "reference_T"):
        np.testing.assert_allclose(getattr(result, kind), getattr(expected, kind), atol=ROUNDED, rtol=0, err_msg=kind)
    for step, wanted in zip(result.steps, expected.steps, strict=True):
        for statistic in ("loss", "grad_norm", "entropy", "kl_reference"):
            assert getattr(step, statistic) == pytest.approx(getattr(wanted, statistic), rel=1e-6, abs=1e-8), statistic
        assert (step.mtp_loss is None) == (mtp_loss == 0)
        assert step.mtp_loss is None or step.mtp_loss == pytest.approx(wanted.mtp_loss, rel=1e-8)
    assert result.weights.keys() == expected.weights.keys()
    for tensor_name, weight in result.weights.items():
        np.testing.assert_allclose(weight, expected.weights[tensor_name], atol=ROUNDED, rtol=0, err_msg=tensor_name)


@pytest.mark.skipif(not duplicated_linear.needed(), reason="this version of Megatron marks them itself")
def test_weights_that_ranks_duplicate_count_once_in_the_gradient_norm(deepseek):
    """The down-projections to the latents. Without the patch each tensor-parallel rank would add its copy."""
    batch = random_batch()
    whole = run_ranks(first_step, 1, deepseek_settings(deepseek["plain"], Layout()), batch).grad_norm
    chosen = deepseek_settings(deepseek["plain"], LAYOUTS["tp2"])
    assert run_ranks(first_step, 2, chosen, batch).grad_norm == pytest.approx(whole, rel=1e-5)
    assert run_ranks(first_step, 2, chosen, batch, without=["duplicated_linear"]).grad_norm > whole * 1.001


# -- weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout", "mtp_loss"),
    [
        ("odd", "tp2-ep2", 0.3), ("odd", "tp2-ep2", 0.0), ("yarn-unscaled", "tp2-etp2", 0.0), ("yarn-unscaled", "tp2-etp2", 0.3),
        ("plain", "pp2", 0.3), ("plain", "pp2", 0.0), ("plain", "pp2-vpp2", 0.3), ("plain", "pp2-vpp2", 0.0),
    ],
)  # fmt: skip
def test_loading_and_exporting_gives_the_checkpoint_back_bit_by_bit(name, layout, mtp_loss, deepseek, tmp_path):
    require_megatron_for(deepseek[name])
    chosen = deepseek_settings(deepseek[name], LAYOUTS[layout], mtp_loss=mtp_loss)
    names, served = run_ranks(export_to, chosen.train.layout.ranks, chosen, tmp_path)
    original = load_file(deepseek[name] / "model.safetensors")
    assert sorted(names) == sorted(original)
    with HFCheckpoint(tmp_path) as exported:
        assert sorted(exported.names()) == sorted(original)
        for tensor_name, tensor in original.items():
            assert exported.read(tensor_name).equal(tensor), tensor_name
    # A server has no layers of multi-token prediction.
    later = ("model.layers.4.", "model.layers.5.")
    assert sorted(spec.name for spec in served) == sorted(n for n in original if not n.startswith(later))


RAGGED = ScratchModel(
    family="deepseek_v3", hidden_size=192, num_layers=2, num_heads=4, head_dim=44, ffn_size=136, num_experts=4, mtp_layers=1
)
"""Blocks of 128 end within its matrices, and lie across the edges of their shards."""


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder in FP8, as DeepSeek-V3 is published, and the same after its conversion to float32."""
    root = tmp_path_factory.mktemp("published")
    write_scratch_model(RAGGED, 32, root / "plain", seed=0)
    convert(Conversion(source=root / "plain", target=root / "fp8", dtype="fp8"), dry_run=False)
    convert(Conversion(source=root / "fp8", target=root / "float32", dtype="float32"), dry_run=False)
    return root


@pytest.mark.parametrize(("layout", "mtp_loss"), [("tp2-etp2", 0.0), ("tp2-ep2", 0.3), slow("pp2", 0.0), slow("one", 0.3)])
def test_ranks_load_a_published_fp8_folder_as_its_conversion(layout, mtp_loss, published, tmp_path):
    chosen = deepseek_settings(published / "fp8", LAYOUTS[layout], mtp_loss=mtp_loss)
    names, _ = run_ranks(export_to, chosen.train.layout.ranks, chosen, tmp_path)
    converted = load_file(published / "float32" / "model.safetensors")
    assert sorted(names) == sorted(converted)
    with HFCheckpoint(tmp_path) as exported:
        for name, tensor in converted.items():
            assert exported.read(name).equal(tensor), name


@pytest.mark.parametrize("mtp_loss", [0.0, 0.3])
def test_in_bfloat16_the_biases_of_routers_keep_every_bit(mtp_loss, deepseek, tmp_path):
    chosen = deepseek_settings(deepseek["plain"], LAYOUTS["ep2"], dtype="bfloat16", mtp_loss=mtp_loss)
    _, served = run_ranks(export_to, 2, chosen, tmp_path)
    original = load_file(deepseek["plain"] / "model.safetensors")
    with HFCheckpoint(tmp_path) as exported:
        for name, tensor in original.items():
            is_kept = name.endswith("e_score_correction_bias") or (mtp_loss == 0 and _is_of_mtp_alone(name))
            assert exported.read(name).equal(tensor if is_kept else tensor.bfloat16()), name
    in_float32 = {spec.name for spec in served if spec.dtype == "float32"}
    assert in_float32 == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}


def _is_of_mtp_alone(name):
    return name.startswith(("model.layers.4.", "model.layers.5.")) and not name.endswith(("embed_tokens.weight", "head.weight"))


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_a_copy_that_differs_from_what_it_copies_is_refused(copy, deepseek, tmp_path):
    (tmp_path / "config.json").write_bytes((deepseek["plain"] / "config.json").read_bytes())
    tensors = load_file(deepseek["plain"] / "model.safetensors")
    tensors[f"model.layers.5.{copy}.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RankError, match=rf"CheckpointError: model.layers.5.{copy}.weight differs from .*, of which it must be a copy"):
        run_ranks(new_engine, 2, deepseek_settings(tmp_path, LAYOUTS["pp2"]))


def test_a_model_that_megatron_would_compute_otherwise_is_refused_by_the_engine_too(deepseek, tmp_path):
    config = json.loads((deepseek["plain"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"topk_group": 1}))
    with pytest.raises(RankError, match="CheckpointError: config.json: needs num_experts_per_tok // topk_group = 2, not 4 // 1"):
        run_ranks(new_engine, 1, deepseek_settings(tmp_path, Layout()))


@pytest.mark.parametrize(("saved", "loaded"), [slow("tp2-ep2", "pp2"), ("pp2", "cp2")])
def test_a_checkpoint_with_biases_and_multi_token_prediction_continues_under_another_layout(saved, loaded, deepseek, tmp_path):
    options = {"mtp_loss": 0.3, "megatron": {"moe_router_bias_update_rate": 0.05}}
    straight, again, _ = run_ranks(
        save_and_continue, 2, deepseek_settings(deepseek["plain"], LAYOUTS[saved], **options), random_batch(), tmp_path
    )
    assert straight.steps == again.steps
    np.testing.assert_array_equal(straight.logprobs_T, again.logprobs_T)
    elsewhere = run_ranks(load_and_continue, 2, deepseek_settings(deepseek["plain"], LAYOUTS[loaded], **options), random_batch(), tmp_path)
    np.testing.assert_allclose(elsewhere.logprobs_T, straight.logprobs_T, atol=1e-4, rtol=0)
    for step, expected in zip(elsewhere.steps, straight.steps, strict=True):
        wanted = (expected.loss, expected.grad_norm, expected.mtp_loss)
        assert (step.loss, step.grad_norm, step.mtp_loss) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.matrix
def test_bfloat16_stays_close_to_float32(deepseek):
    batch = random_batch()
    results = [
        run_ranks(train, 2, deepseek_settings(deepseek["plain"], LAYOUTS["tp2-ep2"], dtype=d), batch, 1) for d in ("float32", "bfloat16")
    ]
    assert np.abs(results[0].before_T - results[1].before_T).mean() < 0.1
    assert results[1].steps[0].grad_norm == pytest.approx(results[0].steps[0].grad_norm, rel=0.1)
    assert torch.isfinite(torch.from_numpy(results[1].after_T)).all()
