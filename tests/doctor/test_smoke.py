"""The doctor's smoke runs: real ones on CPU, what they say when they fail, and what one GPU cannot show."""

import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

from test_runs_gpu import TRIALS

from moerl.check import load_checked
from moerl.config.load import load
from moerl.config.rules import engine_rules
from moerl.doctor import smoke

DEMO = "recipe=grpo-tiny-moe-1n2g-sync"
IN_TURN, APART = smoke.TRIALS


def test_trainer_and_server_that_have_a_machine_in_turn_train_push_and_sleep(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(smoke, "TRIALS", (IN_TURN,))
    (finding,) = smoke.smoke(load([DEMO]), num_gpus=0)
    assert finding.verdict == "ok", finding.found
    assert finding.found.startswith("on CPU: step ") and finding.node == socket.gethostname()
    assert finding.check == "smoke: trainer and server in turn" and "push of 8.0 MB" in finding.found


TRIED = [(trial, engine) for trial in TRIALS for engine in ("hf", "vllm", "sglang") if trial in smoke.TRIALS or engine != "hf"]
"""The one of eight GPUs has servers of several processes, which hf has not."""


@pytest.mark.parametrize(("trial", "engine"), TRIED, ids=lambda part: part if isinstance(part, str) else part.check)
def test_its_runs_are_what_moerl_train_takes(trial, engine, monkeypatch):
    monkeypatch.setattr(engine_rules, "_found_there", lambda *asked: ())  # the engine's own words, where it is installed
    of_recipe = load([DEMO, f"rollout.engine={engine}", "deterministic=false", f"rollout.python={sys.executable}"])
    load_checked(smoke.words(trial, of_recipe))


def test_a_run_that_cannot_go_on_is_a_failure_with_its_cause_and_its_command(monkeypatch):
    monkeypatch.setattr(smoke, "TRIALS", (replace(APART, overrides=("rollout.num_server=2",)),))
    (finding,) = smoke.smoke(load([DEMO]), num_gpus=0)
    assert finding.verdict == "fail" and "rollout.num_server" in finding.found
    assert finding.fix.startswith(f"moerl train {DEMO} ")


def test_what_takes_two_gpus_is_skipped_where_there_is_one_and_tried_on_cpu_by_name(monkeypatch):
    monkeypatch.setattr(smoke, "_tried", lambda trial, config: smoke.ok(trial.check, "", ""))
    assert [finding.verdict for finding in smoke.smoke(load([DEMO]), num_gpus=1)] == ["ok", "skipped"]
    on_cpu = load([DEMO, "placement.device=cpu"])
    assert [finding.verdict for finding in smoke.smoke(on_cpu, num_gpus=1)] == ["ok", "ok"]


def test_the_command_wants_a_recipe(moerl):
    done = moerl("doctor", "--smoke", "--no-measure")
    assert done.returncode == 2 and "takes a recipe" in done.stderr
