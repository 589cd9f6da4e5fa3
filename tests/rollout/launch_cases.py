"""The servers whose command lines are kept as files in tests/rollout/launch; `python tests/rollout/launch_cases.py` writes them anew.

The models of the shipped recipes: on SGLang as their recipes have them, on vLLM in layouts that suit it; and one that uses every field.
"""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

from moerl.config.load import load
from moerl.config.schema.rollout_config import ServerLayout
from moerl.rollout.engines.engine_arguments import Options, as_command_line
from moerl.rollout.engines.sglang import sglang_launch as sglang
from moerl.rollout.engines.vllm import vllm_launch as vllm

DIRECTORY = Path(__file__).parent / "launch"
RECIPES = {
    "deepseek-v3": "grpo-deepseek-v3-32n8g-sync",
    "kimi-k2": "grpo-kimi-k2-32n8g-sync",
    "qwen3-235b": "grpo-qwen3-235b-16n8g-sync",
    "qwen3-235b-two-nodes": "grpo-qwen3-235b-32n8g-sync",
    "glm-4.5": "grpo-glm-4.5-8n8g-sync",
}
EVERYTHING = ServerLayout(
    gpus=16, dp=4, ep=16, all_to_all="deepep_low_latency", redundant_experts=16, kv_cache="fp8", weights="fp8", memory_fraction=0.8,
    mtp_tokens=2, cuda_graph_requests=128, port=26000,
)  # fmt: skip
MODEL = {"model_type": "qwen3_moe", "num_hidden_layers": 1}
NO_GRAPHS = ServerLayout(gpus=4, cuda_graph_requests=0)
VLLM = {
    "deepseek-v3": ServerLayout(gpus=32, dp=8, ep=32, all_to_all="deepep_low_latency", memory_fraction=0.8),
    "kimi-k2": ServerLayout(gpus=16, dp=8, ep=16, all_to_all="deepep_low_latency", weights="fp8"),
    "qwen3-235b": ServerLayout(gpus=16, ep=16),
    "qwen3-235b-one-node": ServerLayout(gpus=8),
    "glm-4.5": ServerLayout(gpus=32, dp=4, ep=32, all_to_all="deepep_normal", mtp_tokens=3),
    "everything": EVERYTHING,
    "no-graphs": NO_GRAPHS,
}


def options(
    layout: ServerLayout, *, max_running: int = 512, prefill_chunk: int = 4096, node_rank: int = 0, shares_gpus: bool = False
) -> Options:
    layout = layout if layout.port else replace(layout, port=25000)
    return Options(
        model=Path("MODEL"), dtype="bfloat16", max_context=8192, max_running=max_running, prefill_chunk=prefill_chunk, returns_routes=False,
        shares_gpus=shares_gpus, pushes_mtp=layout == EVERYTHING, engine_args={}, layout=layout, node_rank=node_rank,
        head="node-0",
    )  # fmt: skip


def cases() -> dict[str, Options]:
    """By engine and model: the second node of a server, or its only one."""
    found = {f"vllm-{name}": layout for name, layout in VLLM.items()}
    found |= {"sglang-everything": EVERYTHING, "sglang-no-graphs": NO_GRAPHS}
    servers = {}
    for name, layout in found.items():
        chunk = 256 if layout.all_to_all == "deepep_low_latency" else 4096
        rank, shares = min(1, layout.nodes - 1), name.startswith("vllm-qwen3")
        servers[name] = options(layout, prefill_chunk=chunk, node_rank=rank, shares_gpus=shares)
    for name, recipe in RECIPES.items():
        rollout = load([f"recipe={recipe}"]).rollout
        rank = min(1, rollout.layout.nodes - 1)
        servers[f"sglang-{name}"] = options(rollout.layout, max_running=rollout.max_running, node_rank=rank, shares_gpus=True)
    return servers


def launch_of(name: str) -> ModuleType:
    return vllm if name.startswith("vllm") else sglang


def arguments(name: str, server: Options) -> dict[str, object]:
    return launch_of(name).arguments(server, MODEL)


def text(name: str, server: Options) -> str:
    """Environment, then one argument a line with its values."""
    environment = sglang.environment(server) if name.startswith("sglang") else {}
    lines = [f"{key}={value}" for key, value in environment.items()]
    lines += [" ".join(as_command_line({key: value})) for key, value in arguments(name, server).items()]
    return "".join(f"{line}\n" for line in lines if line)


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for case, server in cases().items():
        (DIRECTORY / f"{case}.txt").write_text(text(case, server))
