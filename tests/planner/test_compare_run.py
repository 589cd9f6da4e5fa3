"""Plans beside what was found: a GPU that is full tells what was planned, what was on it, and what grew. (Runs: tests/run/test_runs.py.)"""

import pickle
import re
from dataclasses import replace
from typing import get_args

import pytest
import yaml
from engine_cases import random_batch, settings
from engine_ranks import run_ranks
from planned_jobs import filled_gpu

from moerl.config.load import load, to_plain
from moerl.config.schema.layout import Layout
from moerl.planner.compare_run import ELSE, GAPS, OUTSIDE, compared, explained, told_against_plan
from moerl.planner.fixed_memory import GIB
from moerl.planner.memory_plan import memory_plan
from moerl.train.memory.memory_states import Call
from moerl.types.errors import MoerlError, OutOfDeviceMemory, ReportError, TrainError

DEEPSEEK = load(["recipe=grpo-deepseek-v3-32n8g-sync"])


def full(held, *, call="update", stage=1):
    error = OutOfDeviceMemory(f"the GPU is full in {call}")
    error.held, error.call, error.stage = held, call, stage
    return error


def note_of(error):
    with pytest.raises(MoerlError) as caught, explained(DEEPSEEK):
        raise error
    return getattr(caught.value, "__notes__", [])


def test_a_rank_that_runs_out_of_memory_says_what_was_where(checkpoints):
    call, stage, held, text, again = run_ranks(
        filled_gpu, 2, settings(checkpoints["qwen3"], Layout(ranks=2, pp=2), dtype="bfloat16"), random_batch()
    )
    assert (call, stage) == ("update", 1)
    assert held.keys() == {"weights", "gradients", "optimizer", "reference"} and held["gradients"] == 2 * held["weights"] > 0
    assert text.startswith("the GPU is full in update. On it, in GiB: weights ") and text.endswith("Tried to allocate 4.00 GiB.")
    assert (type(again), again.held, again.stage) == (OutOfDeviceMemory, held, 1)


def test_the_message_has_plan_and_finding_and_names_what_grew():
    planned = memory_plan(DEEPSEEK).ranks[1].phases["update"]
    held = {kind: planned[kind] for kind in ("weights", "gradients", "optimizer")}
    held |= {
        ELSE: planned["activations"] + planned["layer at work"] + 9 * GIB,
        GAPS: 2 * GIB,
        OUTSIDE: planned["NCCL"] + planned["CUDA"],
    }
    cause = TrainError("rank 16 of 256 failed in update")
    cause.__cause__ = full(held)
    (note,) = note_of(cause)
    assert note.startswith("planned for a rank of stage 1 in update, and found; GiB")
    rows = {kind: sizes.split() for kind, sizes in re.findall(r"^ *(\S.*?)  +([\d.]+  +[\d.]+  +[\d.-]+)$", note, re.MULTILINE)}
    assert rows["optimizer"][0] == rows["optimizer"][1] and rows["optimizer"][2] == "1.000"
    assert float(rows[ELSE][1]) - float(rows[ELSE][0]) == pytest.approx(9)
    assert note.splitlines()[-1] == f"most over the plan: {ELSE}, by 9 GiB"


@pytest.mark.parametrize("call", get_args(Call))
@pytest.mark.parametrize(("layout", "told"), [(None, "all of the GPU"), (Layout(ranks=64, tp=4, ep=64), "weights")])
def test_a_full_gpu_of_a_model_beside_the_policy_is_set_beside_what_was_planned_for_it(call, layout, told):
    config = load(["recipe=grpo-qwen3-235b-16n8g-sync", "algorithm=ppo"])
    config = replace(config, critic=replace(config.critic, layout=layout))
    if layout is not None and call == "export":
        return  # it pushes nothing
    error = full({"weights": 3 * GIB}, call=call, stage=0)
    error.model = "critic"
    text = told_against_plan(config, pickle.loads(pickle.dumps(error)))
    assert text.startswith(f"planned for a rank of critic of stage 0 in {call}, and found")
    assert told in text


def test_other_failures_have_no_such_note():
    assert note_of(TrainError("rank 3 failed")) == []


def test_a_full_gpu_crosses_processes():
    error = pickle.loads(pickle.dumps(full({"weights": 3}, call="logprobs", stage=2)))
    assert (error.held, error.call, error.stage) == ({"weights": 3}, "logprobs", 2)


def test_metrics_that_are_no_numbers_count_as_not_measured_and_settings_that_are_damaged_are_named(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_plain(DEEPSEEK)))
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "memory/peak/allocated": "abc", "memory/peak/reserved": NaN, "memory/host/x": null}\n'
    )
    text = compared(tmp_path)
    assert all(line.split()[-2:] == ["-", "-"] for line in text.splitlines()[2:])
    (tmp_path / "config.yaml").write_text("a: [1")
    with pytest.raises(ReportError, match=r"config\.yaml = damaged: must be YAML"):
        compared(tmp_path)


def test_a_directory_that_is_no_run_is_told_what_one_holds(tmp_path):
    with pytest.raises(ReportError, match=r"no run directory with a step: must hold config\.yaml and metrics\.jsonl"):
        compared(tmp_path)


def test_an_evaluation_before_the_first_step_is_no_step_that_was_measured(tmp_path):
    config = load(["recipe=grpo-tiny-moe-1n2g-sync"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/repeat/reward": 0.5}\n{"step": 1, "memory/peak/process": 1000}\n')
    assert "as measured in 1 steps" in compared(tmp_path)


def test_copies_on_the_host_are_not_measured_where_a_critic_has_some_too(tmp_path):
    """A rank tells of the policy's alone; the plan is of both."""
    rows = '{"step": 1, "memory/host/optimizer": 7231488, "memory/host/parameters": 3616256}\n'
    found = {}
    for name, words in (("alone", ()), ("critic", ("algorithm=ppo", "critic={}"))):
        (directory := tmp_path / name).mkdir()
        config = load(["recipe=grpo-tiny-moe-1n2g-sync", "train.offload=all", "train.layout={ranks: 2, pp: 2, ep: 1}", *words])
        (directory / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
        (directory / "metrics.jsonl").write_text(rows)
        found[name] = re.search(r"copies of what leaves the GPU(.*)", compared(directory))[1].split()
    assert found["alone"] == ["0.010", "0.010", "1.000"]
    assert found["critic"] == ["0.020", "-", "-"]
