"""The optimizer's states in narrower types, and what Megatron's optimizer is told."""

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import LAYOUTS, random_batch, settings
from engine_jobs import train
from engine_ranks import RankError, run_ranks
from memory_jobs import adam_against_torch, bytes_by_state, load_and_continue, optimizer_arguments, save_and_continue, with_train

from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import OptimizerMemory

AWARE = OptimizerMemory(precision_aware=True)
NARROW = OptimizerMemory(precision_aware=True, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="float16")
NARROWEST = OptimizerMemory(
    precision_aware=True, main_params_dtype="float16", main_grads_dtype="bfloat16", exp_avg_dtype="float16", exp_avg_sq_dtype="float16"
)


def case(checkpoints, memory, layout="ep2", **changes):
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS[layout] if layout else Layout(), dtype="bfloat16")
    return with_train(chosen, optimizer=replace(chosen.train.optimizer, memory=memory), **changes)


@pytest.fixture(scope="module")
def wide(checkpoints):
    return run_ranks(train, 2, case(checkpoints, OptimizerMemory()), random_batch())


def test_states_kept_by_the_optimizer_in_float32_change_no_bit(checkpoints, wide):
    result = run_ranks(train, 2, case(checkpoints, AWARE), random_batch())
    assert result.steps == wide.steps
    np.testing.assert_array_equal(result.after_T, wide.after_T)


@pytest.mark.parametrize("memory", [NARROW, NARROWEST], ids=["narrow", "narrowest"])
def test_narrower_states_stay_close(memory, checkpoints, wide):
    result = run_ranks(train, 2, case(checkpoints, memory), random_batch())
    assert result.steps != wide.steps
    assert result.steps[-1].grad_norm == pytest.approx(wide.steps[-1].grad_norm, rel=0.1)
    assert np.abs(result.after_T - wide.after_T).mean() < 0.06


def test_narrower_states_take_the_bytes_they_say(checkpoints):
    """Per parameter: 4 bytes of master weight and 2 * 4 of moments become 4 + 2 + 2, or 2 + 2 + 2 and 2 of gradient."""
    held = {}
    for name, memory in {"wide": OptimizerMemory(), "narrow": NARROW, "narrowest": NARROWEST}.items():
        stats, _, _ = run_ranks(bytes_by_state, 1, case(checkpoints, memory, layout=None, offload="optimizer"), random_batch())
        held[name] = stats.device_bytes["training"]
        assert stats.device_bytes["scoring"]["optimizer"] == 0
    assert held["narrow"]["optimizer"] * 12 == held["wide"]["optimizer"] * 8
    assert held["narrowest"]["optimizer"] * 12 == held["wide"]["optimizer"] * 6
    assert held["narrowest"]["gradients"] * 2 == held["wide"]["gradients"]


@pytest.mark.parametrize(
    "memory",
    [pytest.param(AWARE, marks=pytest.mark.matrix), pytest.param(NARROW, marks=pytest.mark.matrix), NARROWEST],
    ids=["aware", "narrow", "narrowest"],
)
def test_a_checkpoint_of_narrower_states_continues_as_if_nothing_had_happened(memory, checkpoints, tmp_path):
    chosen = case(checkpoints, memory, offload="all")
    straight, again = run_ranks(save_and_continue, 2, chosen, random_batch(), tmp_path, True)
    assert straight[0] == again[0]
    np.testing.assert_array_equal(straight[1], again[1])
    elsewhere = run_ranks(load_and_continue, 2, case(checkpoints, OptimizerMemory(), "tp2"), random_batch(), tmp_path)
    assert np.abs(elsewhere[1] - straight[1]).mean() < 0.06


def test_the_reference_adam_is_torchs_adamw():
    assert run_ranks(adam_against_torch, 1) < 1e-6


def test_megatron_is_told_every_setting(checkpoints):
    memory = OptimizerMemory(cpu_fraction=0.5, cpu_overlap=True, precision_aware=True)
    told = run_ranks(optimizer_arguments, 1, case(checkpoints, memory).train)
    assert told["optimizer_cpu_offload"] is True
    assert (told["optimizer_offload_fraction"], told["overlap_cpu_optimizer_d2h_h2d"]) == (0.5, True)
    told = run_ranks(optimizer_arguments, 1, case(checkpoints, NARROWEST, overlap_grad_reduce=True, overlap_param_gather=True).train)
    names = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    assert [str(told[name]) for name in names] == ["torch.float16", "torch.bfloat16", "torch.float16", "torch.float16"]
    assert told["use_precision_aware_optimizer"] and told["overlap_param_gather"] and not told["optimizer_cpu_offload"]


def test_the_hybrid_optimizer_is_refused_without_a_gpu(checkpoints):
    with pytest.raises(RankError, match=r"train.optimizer.memory.cpu_fraction = 0.5: needs a GPU"):
        run_ranks(train, 2, case(checkpoints, OptimizerMemory(cpu_fraction=0.5)), random_batch())
