"""What the planner takes from engines is what their sources say (marker `engine`: nothing is started)."""

import re
import subprocess
from pathlib import Path

import pytest

from moerl.config.rules.engine_rules import interpreter
from moerl.config.schema.rollout_config import RolloutConfig
from moerl.planner import fixed_memory as fixed


def source(engine, file):
    python = interpreter(RolloutConfig(engine=engine, max_response_tokens=1))
    asked = f"import importlib.util; print(importlib.util.find_spec('{engine}').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    return (Path(found.stdout.strip()) / file).read_text()


@pytest.mark.engine
def test_vllms_own_share_of_a_gpu():
    (default,) = re.findall(r"gpu_memory_utilization: float = Field\(default=([\d.]+)", source("vllm", "config/cache.py"))
    assert float(default) == fixed.VLLM_FRACTION


@pytest.mark.engine
def test_what_sglang_leaves_beside_its_share():
    text = source("sglang", "srt/arg_groups/memory_hook.py")
    least = re.findall(r"gpu_mem > 60 \* 1024:\s+reserved_mem = max\(reserved_mem, (\d+) \* 1024\)", text)
    assert [int(gib) * fixed.GIB for gib in least] == [fixed.SGLANG_RUNTIME]
    assert "mem_fraction_static = (\n            round((gpu_mem - reserved_mem) / gpu_mem, 3)" in text
