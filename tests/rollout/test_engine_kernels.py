"""What engines run experts with on GPUs, by their own decision for the servers that moerl starts: their classes are asked, on CPU."""

import json
import subprocess
from pathlib import Path

import pytest
from launch_cases import arguments, cases

from moerl.config.rules import engine_rules

pytestmark = pytest.mark.engine

VLLM = {
    "vllm-deepseek-v3": "BatchedTritonExperts",
    "vllm-qwen3-235b": "TritonExperts",
    "vllm-qwen3-235b-one-node": "TritonExperts",
    "vllm-glm-4.5": "TritonExperts",
}
"""Kernels of those with weights in bfloat16: batched where DeepEP's kernels for latency bring tokens."""


def chosen(engine: str, names: list[str], directory: Path) -> dict[str, str]:
    servers, out = cases(), directory / "chosen.json"
    given = [arguments(name, servers[name]) for name in names]
    python = Path(engine_rules.__file__).parents[3] / f".venv-{engine}" / "bin" / "python"
    command = [str(python), str(Path(__file__).parent / f"{engine}_kernels.py"), str(out)]
    done = subprocess.run(command, input=json.dumps(given, default=str), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(names, json.loads(out.read_text()), strict=True))


def test_sglang_has_a_runner_for_every_server_that_spreads_experts_by_deepep(tmp_path):
    names = [name for name, server in cases().items() if name.startswith("sglang") and server.layout.uses_deepep]
    assert chosen("sglang", names, tmp_path) == dict.fromkeys(names, "deep_gemm")


def test_vllm_has_kernels_for_every_server_of_experts_in_bfloat16(tmp_path):
    assert chosen("vllm", list(VLLM), tmp_path) == VLLM
