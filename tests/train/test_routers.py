"""What routers do beside routing: off in RL, and right where train.megatron asks for it."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from deepseek_cases import deepseek_settings, slow, write_deepseek
from engine_cases import LAYOUTS, random_batch
from engine_ranks import run_ranks
from router_jobs import biases
from transformers import AutoModelForCausalLM

from moerl.config.schema.layout import Layout
from moerl.types.batch import TrainBatch

RATE = 0.01
UPDATED = {"moe_router_bias_update_rate": RATE}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_deepseek(tmp_path_factory.mktemp("deepseek"), "plain")["plain"]


# -- biases --------------------------------------------------------------------------------------------------------


def short_batch():
    """Sequences of five tokens: context parallelism over four ranks pads each with three."""
    rng = np.random.default_rng(1)
    return TrainBatch(
        token_ids_T=rng.integers(5, 90, size=100),
        response_mask_T=np.arange(100) % 5 > 0,
        rollout_logprobs_T=np.full(100, -4.5, dtype=np.float32),
        advantages_T=rng.normal(size=100).astype(np.float32),
        offsets=np.arange(0, 101, 5),
    )


def chosen_experts(model, batch):
    """Tokens per expert [E] of each layer with experts, by the name of its bias; one sequence after the other."""
    counts, gates = {}, {name: gate for name, gate in model.named_modules() if name.endswith(".mlp.gate")}

    def count(name, output):
        indices = output[2].flatten()
        counts[f"{name}.e_score_correction_bias"] = counts.get(f"{name}.e_score_correction_bias", 0) + torch.bincount(indices, minlength=8)

    hooks = [gate.register_forward_hook(lambda _, __, output, name=name: count(name, output)) for name, gate in gates.items()]
    with torch.no_grad():
        for start, end in pairwise(batch.offsets):
            model(input_ids=torch.from_numpy(batch.token_ids_T[start:end])[None])
    for hook in hooks:
        hook.remove()
    return counts


def test_biases_stay_as_they_are_unless_an_update_rate_is_set(directory):
    _, before, after = run_ranks(biases, 1, deepseek_settings(directory, Layout(), mtp_loss=0.3), random_batch())
    assert len(before) == 5
    for name, bias in before.items():
        np.testing.assert_array_equal(after[name], bias)


@pytest.mark.parametrize("layout", ["one", slow("dp2"), slow("tp2"), slow("pp2"), "cp4", "tp2-ep2"])
def test_a_bias_moves_by_the_rate_towards_the_mean_load_whatever_the_layout_and_its_padding(layout, directory):
    chosen = deepseek_settings(directory, Layout() if layout == "one" else LAYOUTS[layout], megatron=UPDATED)
    batch = short_batch()
    _, before, after = run_ranks(biases, chosen.train.layout.ranks, chosen, batch)
    counts = chosen_experts(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), batch)
    assert len(counts) == 3
    for name, load_E in counts.items():
        expected = before[name] + RATE * np.sign((load_E.float().mean() - load_E).numpy())
        np.testing.assert_allclose(after[name], expected, atol=1e-6, rtol=0, err_msg=name)


@pytest.mark.parametrize("layout", [slow("tp2"), "cp2", slow("pp2")])
def test_biases_of_multi_token_prediction_move_alike_under_every_layout(layout, directory):
    options = {"megatron": UPDATED, "mtp_loss": 0.3}
    _, before, expected = run_ranks(biases, 1, deepseek_settings(directory, Layout(), **options), random_batch())
    _, _, after = run_ranks(biases, 2, deepseek_settings(directory, LAYOUTS[layout], **options), random_batch())
    for name, bias in expected.items():
        assert np.abs(bias - before[name]).max() == pytest.approx(RATE, rel=1e-3)
        np.testing.assert_array_equal(after[name], bias, err_msg=name)


@pytest.mark.parametrize("recompute", [{"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}])
def test_a_layer_that_is_computed_again_counts_its_tokens_once(recompute, directory):
    _, _, expected = run_ranks(biases, 2, deepseek_settings(directory, LAYOUTS["pp2"], megatron=UPDATED), random_batch())
    _, _, after = run_ranks(biases, 2, deepseek_settings(directory, LAYOUTS["pp2"], megatron=UPDATED | recompute), random_batch())
    for name, bias in expected.items():
        np.testing.assert_array_equal(after[name], bias, err_msg=name)


def test_a_policy_that_waits_for_its_critic_keeps_its_biases(directory):
    """Its learning rate is 0 then."""
    _, before, after = run_ranks(biases, 1, deepseek_settings(directory, Layout(), megatron=UPDATED), random_batch(), 1, 0.0)
    for name, bias in before.items():
        np.testing.assert_array_equal(after[name], bias)


def test_an_update_that_is_not_finite_leaves_the_biases(directory):
    batch = random_batch()
    broken = replace(batch, advantages_T=np.where(np.arange(len(batch.token_ids_T)) == 5, np.nan, batch.advantages_T).astype(np.float32))
    stats, before, after = run_ranks(biases, 1, deepseek_settings(directory, Layout(), megatron=UPDATED), broken)
    assert len(stats.skipped_updates) == 1
    for name, bias in before.items():
        np.testing.assert_array_equal(after[name], bias)
