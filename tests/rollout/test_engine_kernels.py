"""What engines run experts with on GPUs, by their own decision for the servers that moerl starts: their classes are asked, on CPU."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_cases import arguments, cases, options
from pydantic import TypeAdapter

from moerl.config.derive.model_configs import shipped_configs
from moerl.config.rules import engine_rules
from moerl.config.schema.rollout_config import ServerLayout
from moerl.rollout.engines.engine_arguments import Options

pytestmark = pytest.mark.engine

VLLM = {
    "vllm-deepseek-v3": "BatchedTritonExperts",
    "vllm-qwen3-235b": "TritonExperts",
    "vllm-qwen3-235b-one-node": "TritonExperts",
    "vllm-glm-4.5": "TritonExperts",
    "vllm-kimi-k2": "BatchedDeepGemmExperts",
}
"""Kernels: batched where DeepEP's kernels for latency bring tokens, DeepGEMM's for weights in FP8."""


def asked(engine: str, script: str, given: str, directory: Path) -> Any:
    """What a script of this folder writes, in the engine's environment, of what it is given as JSON."""
    out = directory / "said.json"
    python = Path(engine_rules.__file__).parents[3] / f".venv-{engine}" / "bin" / "python"
    command = [str(python), str(Path(__file__).parent / script), str(out)]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text())


def chosen(engine: str, names: list[str], directory: Path) -> dict[str, str]:
    servers = cases()
    given = json.dumps([arguments(name, servers[name]) for name in names], default=str)
    return dict(zip(names, asked(engine, f"{engine}_kernels.py", given, directory), strict=True))


def test_sglang_has_a_runner_for_every_server_that_spreads_experts_by_deepep(tmp_path):
    names = [name for name, server in cases().items() if name.startswith("sglang") and server.layout.uses_deepep]
    assert chosen("sglang", names, tmp_path) == dict.fromkeys(names, "deep_gemm")


def test_vllm_has_kernels_for_every_server_of_experts(tmp_path):
    assert chosen("vllm", list(VLLM), tmp_path) == VLLM


def test_vllm_counts_the_processes_of_a_server_over_nodes_and_shares_out_experts_as_a_push_does(tmp_path):
    """Each group on a node, several groups on one, a group over several; what no CPU can run."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((shipped_configs() / "published" / "deepseek-v3.json").read_text())
    layouts = {
        "a group over two nodes": ServerLayout(gpus=16, ep=16),
        "a group a GPU": ServerLayout(gpus=16, dp=16, ep=16),
        "groups that fill nodes": ServerLayout(gpus=32, dp=4, ep=32),
        "two groups a node": ServerLayout(gpus=32, dp=8, ep=32),
        "groups over two nodes each": ServerLayout(gpus=16, gpus_per_node=4, dp=2, ep=16),
        "one node": ServerLayout(gpus=8, dp=4, ep=8),
    }
    servers = {name: replace(options(layout), model=model, head="127.0.0.1") for name, layout in layouts.items()}
    nodes = asked("vllm", "vllm_nodes.py", TypeAdapter(dict[str, Options]).dump_json(servers).decode(), tmp_path)
    for name, layout in layouts.items():
        assert [len(node) for node in nodes[name]] == [layout.gpus // layout.nodes] * layout.nodes, name
        processes = [process for node in nodes[name] for process in node]
        assert [process["number"] for process in processes] == list(range(layout.gpus)), name
        assert all(process["held"] == process["needed"] and len(process["held"]) == 256 // layout.ep for process in processes), name
