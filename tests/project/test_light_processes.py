"""Processes that hold no model import neither torch nor transformers: each would take 200 MB and 5 CPU seconds for them, and 3000 files."""

import subprocess
import sys

import pytest

MODULES = {
    "driver": ("moerl.run", "moerl.train.train_worker", "moerl.observe.report", "moerl.rollout.fleet.collector_actor"),
    "collector": ("moerl.rollout.fleet.collector_actor", "moerl.models.plain_tokenizer"),
    "reward supervisor": ("moerl.rewards.reward_supervisor",),
    "reward worker": ("moerl.rewards.reward_worker", "moerl.rewards.verifiers"),
}
HEAVY = ("torch", "transformers", "megatron", "megatron_patches", "safetensors.torch")


@pytest.mark.parametrize("role", MODULES)
def test_a_process_without_a_model_imports_no_torch(role):
    source = f"import sys, {', '.join(MODULES[role])}; print([name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout == "[]\n"
