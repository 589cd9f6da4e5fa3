"""What benchmarks/peers.py tells trl follows from the demo's recipe."""

import sys
from pathlib import Path

import pytest

from moerl.config.load import load
from moerl.starting_model import load_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from peer_task import overrides, trl_task
from watched_run import Watched

pytestmark = pytest.mark.usefixtures("forked")


def test_the_settings_of_trl_are_those_of_the_recipe(tmp_path: Path):
    config = load(overrides(24, 3, tmp_path, []))
    task = trl_task(config, threads=2, experts="eager")
    told, optimizer = task["grpo"], config.train.optimizer
    assert (told["max_completion_length"], told["max_steps"], told["num_generations"]) == (24, 3, config.group_size)
    assert told["generation_batch_size"] == config.groups_per_step * config.group_size == 256
    assert told["per_device_train_batch_size"] * told["gradient_accumulation_steps"] == 256
    assert (told["loss_type"], told["epsilon"], told["beta"], told["max_grad_norm"]) == ("grpo", 0.2, 0.0, optimizer.clip_grad)
    assert task["optimizer"] == {"lr": 1e-3, "betas": optimizer.betas, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay}
    assert task["warmup_steps"] == 10 and task["threads"] == 2


def test_trl_gets_each_prompt_of_the_run_once_for_its_group_in_order(tmp_path: Path):
    config = load(overrides(8, 2, tmp_path, []))
    rows = trl_task(config, threads=1, experts="eager")["prompts"]
    assert len(rows) == 2 * config.groups_per_step
    assert all(row["ground_truth"] == row["prompt"][0] * 8 and row["prompt"][1:] == "=" for row in rows)
    other = load([*overrides(8, 2, tmp_path / "other", []), "seed=1"])
    assert rows != trl_task(other, threads=1, experts="eager")["prompts"]
    tokenizer = load_model(config).tokenizer
    assert {len(tokenizer.encode(row["prompt"], add_special_tokens=False)) for row in rows} == {2}


@pytest.mark.parametrize(("tokens", "parts"), [(8, 1), (24, 1), (64, 4)])
def test_a_micro_batch_of_trl_has_at_most_the_tokens_of_both_ranks(tokens: int, parts: int, tmp_path: Path):
    config = load(overrides(tokens, 1, tmp_path, []))
    told = trl_task(config, threads=1, experts="eager")["grpo"]
    assert told["gradient_accumulation_steps"] == parts
    assert told["per_device_train_batch_size"] * (2 + tokens) <= config.train.layout.ranks * config.train.micro_batch_tokens


def test_a_step_is_what_lies_between_two_rows_after_the_warmup():
    roles = [{"driver": (1, 2.0)}, {"driver": (1, 4.0), "server": (1, 1.5)}]
    run = Watched(warmup=2, times=[0, 10, 12, 13, 14, 19], cpu=[9, 11, 12, 13, 17], rewards=[0] * 5, roles=roles)
    assert (run.first_seconds, run.first_cpu, run.step_seconds, run.step_cpu) == (10, 9, 1, 2)
    assert run.step_roles() == {"driver": (1, pytest.approx(2 / 3)), "server": (1, 0.5), "ended": (0, pytest.approx(5 / 6))}
