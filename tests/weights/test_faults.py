"""Faults between the parameters of trainer ranks and the memory a server computes with: each is found, and its message says where."""

import re
import sys
from functools import partial
from pathlib import Path

import fault_jobs
import pytest
import torch
from deepseek_cases import deepseek_settings, write_deepseek
from engine_ranks import run_ranks

from moerl.config.schema.layout import Layout

LAYER = "model.layers.2"
EXPERT, LAST_EXPERT = f"{LAYER}.mlp.experts.1.up_proj.weight", f"{LAYER}.mlp.experts.6.up_proj.weight"
"""Of ranks 0 and 1 of two, with 8 experts."""
NORM, OTHER_NORM = f"{LAYER}.input_layernorm.weight", "model.layers.3.post_attention_layernorm.weight"
BIAS = f"{LAYER}.mlp.gate.e_score_correction_bias"


def flip(target, name, tensors, last):
    if name != target:
        return tensors[name]
    damaged = tensors[name].clone()
    damaged.view(-1).view(torch.uint8)[0] ^= 1
    return damaged


def exchange(first, second, name, tensors, last):
    return tensors[{first: second, second: first}.get(name, name)]


def drop(target, name, tensors, last):
    return None if name == target else tensors[name]


def from_last_version(layer, name, tensors, last):
    return last[name] if name.startswith(layer) else tensors[name]


EXPORTED = {
    "flipped": partial(flip, LAST_EXPERT),
    "experts": partial(exchange, EXPERT, LAST_EXPERT),
    "tensors": partial(exchange, NORM, OTHER_NORM),
    "dropped": partial(drop, LAST_EXPERT),
    "dropped bias": partial(drop, BIAS),
    "stale": partial(from_last_version, f"{LAYER}."),
}
SERVED = {"flipped by the loader": f"flip {EXPERT}", "repack": "repack"}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the push said with each fault."""
    root = tmp_path_factory.mktemp("faults")
    model, fault = write_deepseek(root, "plain")["plain"], root / "fault"
    fault.write_text("none")
    options = ["--model", model, "--max-context", 32, "--max-running", 4, "--prefill-chunk", 8, "--deterministic"]
    command = [sys.executable, str(Path(__file__).parent / "fault_server.py"), str(fault), *map(str, options)]
    settings = deepseek_settings(model, Layout(ranks=2, ep=2))
    return run_ranks(fault_jobs.faults_of_pushes, 2, settings, EXPORTED, SERVED, BIAS, command, fault)


def test_without_a_fault_the_push_and_its_canary_succeed(said):
    assert said["none"] == ""


def test_one_flipped_bit_in_a_bucket_names_the_expert_s_rank(said):
    assert f"tensor '{LAST_EXPERT}'" in said["flipped"]
    assert "trainer rank 1)" in said["flipped"]
    assert "bytes damaged on the way from the trainer's ranks to this server: bits flipped" in said["flipped"]
    assert "\n* 127.0.0.1:" in said["flipped"]


def test_one_flipped_bit_in_the_engine_s_loader_is_told_from_one_on_the_way(said):
    assert f"tensor '{EXPERT}'" in said["flipped by the loader"]
    assert "trainer rank 0)" in said["flipped by the loader"]
    assert "the engine's loader changed them" in said["flipped by the loader"]


def test_two_exchanged_experts_name_both_and_their_ranks(said):
    assert f"tensor '{EXPERT}' (float32[16, 32], trainer rank 0)" in said["experts"]
    assert f"experts exchanged on the way from the trainer's ranks to this server: these are the bytes of {LAST_EXPERT}" in said["experts"]
    assert f"{LAST_EXPERT}, trainer rank 1" in said["experts"]


def test_two_exchanged_tensors_name_both(said):
    assert f"tensor '{NORM}'" in said["tensors"]
    assert f"tensors exchanged on the way from the trainer's ranks to this server: these are the bytes of {OTHER_NORM}" in said["tensors"]


def test_a_dropped_tensor_is_named_with_the_rank_that_holds_it(said):
    assert f"tensor '{LAST_EXPERT}' (float32[16, 32], trainer rank 1)" in said["dropped"]
    assert re.search("which a rank that leaves this tensor out of its bucket finds in the buffer|or a tensor left out", said["dropped"])


def test_a_bucket_of_the_version_before_is_recognised(said):
    assert f"tensor '{LAYER}." in said["stale"]
    assert "stale bytes: they are those of version" in said["stale"]


def test_a_bias_of_experts_that_a_rank_drops_is_named(said):
    assert f"tensor '{BIAS}' (float32[8], trainer rank" in said["dropped bias"]


def test_a_bias_of_experts_that_the_trainer_does_not_name_is_missed_before_any_byte_moves(said):
    assert "failed at begin" in said["hidden"]
    assert f"1 missing: {BIAS}" in said["hidden"]
    assert "leaves out the biases of experts" in said["hidden"]
    assert f"nearest tensor that the trainer's ranks hold is {LAYER}.mlp.gate.weight, trainer rank" in said["hidden"]


def test_a_skipped_repack_is_found_by_the_canary(said):
    assert "canary" in said["repack"]
    assert "* 127.0.0.1:" in said["repack"]
    assert "it computes with other memory than the push installed into" in said["repack"]
