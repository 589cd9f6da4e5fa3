"""A checkpoint continues under its own and under any other layout and dtype, with the optimizer's state."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_jobs import (
    load_and_continue,
    load_and_save,
    load_and_score,
    load_of_another_device,
    moments_around_staging,
    save_and_continue,
    save_and_score,
    save_once,
    staged_and_held,
)  # fmt: skip
from engine_cases import LAYOUTS, random_batch, settings
from engine_ranks import run_ranks
from family_cases import BUILT, write_case

from moerl.config.schema.layout import Layout

NAMED = {**LAYOUTS, "one": Layout(), "tp2-pp2": Layout(ranks=4, tp=2, pp=2)}


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
            chosen = settings(checkpoints[model], NAMED[name])
            straight, again, written = run_ranks(save_and_continue, NAMED[name].ranks, chosen, random_batch(), directory)
            assert again.steps == straight.steps  # bit by bit
            np.testing.assert_array_equal(again.logprobs_T, straight.logprobs_T)
            made[name, model] = directory, straight, written
        return made[name, model]

    return get


RESHARDED = [("tp2-pp2", "ep4"), ("pp2-vpp2", "one"), ("cp2", "tp2"), ("pp3-first1-last1", "pp2")]
SELDOM = [
    ("tp2-pp2-vpp2-cp2-ep4", "tp2-etp2"), ("pp3-counted", "pp2-vpp2"), ("dp2", "tp2-etp2"), ("ep2", "tp2-pp2-vpp2-cp2-ep4"),
    ("tp2-pp2-ep2-dp2", "ep2"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), [*RESHARDED, *(pytest.param(*pair, marks=pytest.mark.matrix) for pair in SELDOM)])
def test_training_continues_under_another_layout(before, after, checkpoints, saved):
    directory, expected, _ = saved(before)
    layout = NAMED[after]
    chosen = settings(checkpoints["qwen3_moe"], layout)
    assert_continues(run_ranks(load_and_continue, layout.ranks, chosen, random_batch(), directory), expected)


def test_a_vocabulary_padded_for_another_tensor_parallel_size_continues(checkpoints, saved):
    """101 rows: 102 under tp=2."""
    for before, after in (("tp2", "one"), ("one", "tp2")):
        directory, expected, _ = saved(before, "untied-qwen3")
        chosen = settings(checkpoints["untied-qwen3"], NAMED[after])
        assert_continues(run_ranks(load_and_continue, NAMED[after].ranks, chosen, random_batch(), directory), expected)


def test_a_stage_without_experts_keeps_its_moments(tmp_path):
    """Megatron makes its ranks an optimizer of experts all the same, which has nothing and never steps."""
    directory = write_case("deepseek_v3", tmp_path, first_k_dense_replace=2, num_nextn_predict_layers=0)
    found = run_ranks(moments_around_staging, 4, settings(directory, Layout(ranks=4, pp=2, ep=2)), random_batch())
    assert all(after == before > 0 for before, after in found), found


# -- dtype -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bfloat16(checkpoints, tmp_path_factory):
    directory = tmp_path_factory.mktemp("bfloat16")
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS["ep2"], dtype="bfloat16")
    straight, again, _ = run_ranks(save_and_continue, 2, chosen, random_batch(), directory)
    assert again.steps == straight.steps
    return directory, straight


def test_a_bfloat16_checkpoint_continues_under_another_layout(checkpoints, bfloat16):
    """Close, not equal: the sums of another layout round differently in bfloat16."""
    directory, expected = bfloat16
    result = run_ranks(
        load_and_continue, 2, settings(checkpoints["qwen3_moe"], LAYOUTS["tp2"], dtype="bfloat16"), random_batch(), directory
    )
    for step, wanted in zip(result.steps, expected.steps, strict=True):
        assert (step.loss, step.grad_norm) == pytest.approx((wanted.loss, wanted.grad_norm), rel=0.1)
    for name, weight in result.weights.items():
        np.testing.assert_allclose(weight, expected.weights[name], atol=6e-3, rtol=2**-7, err_msg=name)


def stored(directory):
    metadata = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items() if hasattr(entry, "size")}
    dcp.load(tensors, checkpoint_id=directory, no_dist=True)
    return tensors


def test_weights_of_a_changed_dtype_come_from_the_masters_exactly(checkpoints, bfloat16, saved, tmp_path):
    """float32 from bfloat16 and bfloat16 from float32, each saved again at once and compared tensor by tensor."""
    up, down = tmp_path / "up", tmp_path / "down"
    for directory in (up, down):
        directory.mkdir()
    model = checkpoints["qwen3_moe"]
    run_ranks(load_and_save, 2, settings(model, LAYOUTS["tp2"]), bfloat16[0], up)
    before, after = stored(bfloat16[0]), stored(up)
    assert not any(name.startswith("optimizer.state.param.") for name in after)
    assert any(not torch.equal(before[f"optimizer.state.param.{name}"], before[name].float()) for name in after if "optimizer" not in name)
    for name, tensor in after.items():
        source = name if name.startswith("optimizer.") else f"optimizer.state.param.{name}"
        assert torch.equal(tensor, before[source]), name

    directory = saved("cp2")[0]
    run_ranks(load_and_save, 2, settings(model, LAYOUTS["ep2"], dtype="bfloat16"), directory, down)
    before, after = stored(directory), stored(down)
    for name, tensor in after.items():
        source = before[name.removeprefix("optimizer.state.param.")]
        assert torch.equal(tensor, source.to(tensor.dtype)), name
    assert any(name.startswith("optimizer.state.param.") for name in after)


@pytest.mark.skipif("deepseek_v32" not in BUILT, reason="this version of Megatron has no indexers")
def test_weights_that_are_not_trained_have_no_masters_and_come_as_they_are(tmp_path):
    model, narrow, wide = write_case("deepseek_v32", tmp_path), tmp_path / "narrow", tmp_path / "wide"
    for directory in (narrow, wide):
        directory.mkdir()
    run_ranks(save_once, 1, settings(model, Layout(), dtype="bfloat16"), random_batch(), narrow)
    run_ranks(load_and_save, 1, settings(model, Layout()), narrow, wide)
    before, after = stored(narrow), stored(wide)
    frozen = [name for name in after if ".indexer." in name]
    assert frozen
    assert not any(f"optimizer.state.param.{name}" in before for name in frozen)
    for name in frozen:
        assert torch.equal(after[name], before[name].float()), name


# -- random streams --------------------------------------------------------------------------------------------


def test_random_streams_continue_under_the_same_layout(checkpoints, tmp_path):
    """Router jitter draws from them in every forward pass; another process continues with the same noise."""
    quiet = settings(checkpoints["qwen3_moe"], LAYOUTS["ep2"])
    chosen = replace(quiet, train=replace(quiet.train, megatron={"moe_input_jitter_eps": 0.1}))
    straight, again, _ = run_ranks(save_and_continue, 2, chosen, random_batch(), tmp_path)
    assert again.steps == straight.steps
    assert run_ranks(load_and_continue, 2, chosen, random_batch(), tmp_path).steps == straight.steps
    assert run_ranks(load_and_continue, 2, quiet, random_batch(), tmp_path).steps != straight.steps


def test_a_checkpoint_of_ranks_on_gpus_continues_on_cpu_with_random_streams_that_start_anew(checkpoints, tmp_path):
    """And the other way round: the states have 16 bytes and 5,056."""
    chosen = settings(checkpoints["qwen3"], LAYOUTS["dp2"])
    straight, again = run_ranks(load_of_another_device, 2, chosen, random_batch(), tmp_path)
    assert_continues(again, straight)


# -- who writes what -------------------------------------------------------------------------------------------


def sizes(written):
    """Bytes of each rank's one shard file."""
    assert [list(share.files) for share in written] == [[f"__{rank}_0.distcp"] for rank in range(len(written))]
    return [size for share in written for size, _ in share.files.values()]


@pytest.mark.parametrize("name", ["cp2", "tp2-pp2-ep2-dp2"])
def test_ranks_share_the_writing_evenly_and_nothing_is_written_twice(name, saved):
    directory, _, written = saved(name)
    tensors = stored(directory)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert {key for key in tensors if key.startswith("optimizer")} == {
        f"optimizer.state.{state}.{key}" for key in tensors if not key.startswith("optimizer") for state in ("exp_avg", "exp_avg_sq")
    }
    shares = sizes(written)
    index = dcp.FileSystemReader(directory).read_metadata().storage_data
    assert sum(info.length for info in index.values()) == sum(shares)
    assert num_bytes < sum(shares) < num_bytes + 2000 * len(index) + 20_000 * len(shares)  # what torch.save adds; the random streams
    assert max(shares) < 1.6 * min(shares)


def test_a_rank_stages_no_more_than_it_holds(checkpoints, tmp_path):
    layout = LAYOUTS["tp2-ep2-dp2"]
    for staged, moments, weights in run_ranks(
        staged_and_held, layout.ranks, settings(checkpoints["qwen3_moe"], layout), random_batch(), tmp_path
    ):
        assert 0 < staged <= moments + weights


def test_without_a_host_copy_the_same_bytes_are_written(checkpoints, tmp_path):
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS["ep2"])
    for directory in ("copied", "direct"):
        (tmp_path / directory).mkdir()
    copied = run_ranks(save_once, 2, chosen, random_batch(), tmp_path / "copied", True)
    direct = run_ranks(save_once, 2, chosen, random_batch(), tmp_path / "direct", False)
    assert [share.files for share in copied] == [share.files for share in direct]


@pytest.mark.parametrize(("dtype", "name"), [("float32", "one"), ("bfloat16", "ep2")])
def test_a_rank_that_does_not_train_loads_the_weights_and_holds_nothing_else(dtype, name, checkpoints, tmp_path):
    trains = settings(checkpoints["qwen3_moe"], NAMED["ep2"], dtype=dtype)
    expected_T = run_ranks(save_and_score, 2, trains, random_batch(), tmp_path)
    chosen = settings(checkpoints["qwen3_moe"], NAMED[name], dtype=dtype)
    scores = replace(chosen, trains=False, train=replace(chosen.train, offload="optimizer"))
    before_T, after_T, held = run_ranks(load_and_score, NAMED[name].ranks, scores, random_batch(), tmp_path)
    np.testing.assert_allclose(after_T, expected_T, atol=0 if name == "ep2" else 1e-5, rtol=0)
    assert np.abs(before_T - expected_T).max() > 1e-3
    assert held["parameters"] > 0
    assert (held["gradients"], held["optimizer"], held["reference"]) == (0, 0, 0)
