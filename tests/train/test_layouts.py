"""Every parallel layout computes what one process computes: log-probs, losses, gradient norms, weights after three updates."""

from pathlib import Path

import numpy as np
import pytest
from engine_ranks import random_batch, run_ranks, settings

from moerl.algorithms.grpo import GRPO
from moerl.config.layout import Layout
from moerl.config.schema import GRPOConfig
from moerl.models.checkpoint import HFCheckpoint, write_shards

LAYOUTS = {
    "dp2": Layout(ranks=2),
    "tp2": Layout(ranks=2, tp=2),
    "tp2-etp2": Layout(ranks=2, tp=2, etp=2),
    "ep2": Layout(ranks=2, ep=2),
    "tp2-ep2": Layout(ranks=2, tp=2, ep=2),
    "tp2-ep2-etp2-dp2": Layout(ranks=4, tp=2, ep=2, etp=2),
}
DENSE = ("dp2", "tp2")


def train_three_steps(engine, batch):
    """Log-probs before and after, statistics of each step, weights at the end."""
    before_T = engine.logprobs(batch)
    objective = GRPO(GRPOConfig(kl_coefficient=0.1))
    stats = []
    for _ in range(3):
        referenced = batch.with_logprobs(reference_logprobs_T=engine.reference_logprobs(batch))
        stats.append(engine.update(referenced, objective, lr=1e-3, num_updates=2))
    weights = {name: tensor.float().numpy().copy() for name, tensor in engine.export()}
    return before_T, stats, engine.logprobs(batch), weights


@pytest.fixture(scope="module")
def references(checkpoints, tmp_path_factory):
    store = tmp_path_factory.mktemp("stores")
    return {
        family: run_ranks(train_three_steps, settings(directory, Layout(), uses_reference=True), store / family, random_batch())
        for family, directory in checkpoints.items()
    }


def assert_equal_to_one_process(result, reference):
    for values_T, expected_T in ((result[0], reference[0]), (result[2], reference[2])):
        np.testing.assert_allclose(values_T, expected_T, atol=1e-5, rtol=0)
    for stats, expected in zip(result[1], reference[1], strict=True):
        for name in ("loss", "grad_norm", "entropy", "mismatch_mean", "mismatch_max", "kl_reference", "num_tokens"):
            assert getattr(stats, name) == pytest.approx(getattr(expected, name), rel=1e-5, abs=1e-8), name
    assert result[3].keys() == reference[3].keys()
    # Adam divides by the root of a squared gradient: where that is rounding, so is the sign of the step.
    for name, weight in result[3].items():
        np.testing.assert_allclose(weight, reference[3][name], atol=3e-5, rtol=0, err_msg=name)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_mixture_of_experts_equals_one_process(name, checkpoints, references, tmp_path):
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS[name], uses_reference=True)
    assert_equal_to_one_process(run_ranks(train_three_steps, chosen, tmp_path / "store", random_batch()), references["qwen3_moe"])


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_model_equals_one_process(name, checkpoints, references, tmp_path):
    chosen = settings(checkpoints["qwen3"], LAYOUTS[name], uses_reference=True)
    assert_equal_to_one_process(run_ranks(train_three_steps, chosen, tmp_path / "store", random_batch()), references["qwen3"])


def test_one_sequence_per_micro_batch_equals_packed(checkpoints, references, tmp_path):
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS["ep2"], uses_reference=True, micro_batch_tokens=19)
    assert_equal_to_one_process(run_ranks(train_three_steps, chosen, tmp_path / "store", random_batch()), references["qwen3_moe"])


def test_the_first_step_has_no_kl_to_the_reference(references):
    assert [stats.kl_reference == 0.0 for stats in references["qwen3_moe"][1]][1:] == [False, False]


def test_bfloat16_trains_with_finite_numbers(checkpoints, tmp_path):
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS["ep2"], dtype="bfloat16", uses_reference=True)
    before_T, stats, after_T, _ = run_ranks(train_three_steps, chosen, tmp_path / "store", random_batch())
    assert all(np.isfinite([s.loss, s.grad_norm, s.entropy]).all() for s in stats)
    assert np.abs(after_T - before_T).max() > 1e-3


def train_save_load_train(engine, batch, directory):
    """Losses and log-probs of two more steps, straight on and again from the checkpoint taken in between."""
    objective = GRPO(GRPOConfig())
    engine.update(batch, objective, lr=1e-3, num_updates=2)
    engine.save(directory)
    straight = [engine.update(batch, objective, lr=1e-3, num_updates=1) for _ in range(2)], engine.logprobs(batch)
    engine.load(directory)
    again = [engine.update(batch, objective, lr=1e-3, num_updates=1) for _ in range(2)], engine.logprobs(batch)
    return straight, again


@pytest.mark.parametrize("name", ["ep2", "tp2-ep2"])
def test_training_from_a_checkpoint_is_bitwise_what_it_was(name, checkpoints, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS[name])
    straight, again = run_ranks(train_save_load_train, chosen, tmp_path / "store", random_batch(), tmp_path / "checkpoint")
    assert straight[0] == again[0]
    np.testing.assert_array_equal(straight[1], again[1])


def export_to(engine, directory):
    names = engine.model.bridge.names()
    write_shards(engine.export(), directory, shard_bytes=20_000)
    return names


@pytest.mark.parametrize("name", ["dp2", "tp2-ep2", "tp2-ep2-etp2-dp2"])
def test_loading_and_exporting_gives_the_checkpoint_back_bit_by_bit(name, checkpoints, tmp_path):
    original = checkpoints["qwen3_moe"]
    names = run_ranks(export_rank0, settings(original, LAYOUTS[name]), tmp_path / "store", tmp_path)
    with HFCheckpoint(original) as before, HFCheckpoint(tmp_path) as after:
        assert set(names) == set(before._files) == set(after._files)
        for tensor_name in names:
            assert before.read(tensor_name).equal(after.read(tensor_name)), tensor_name


def export_rank0(engine, directory: Path):
    import torch.distributed as dist

    if dist.get_rank() == 0:
        return export_to(engine, directory)
    assert list(engine.export()) == []
    return None
