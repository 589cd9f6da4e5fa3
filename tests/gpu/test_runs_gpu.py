"""Whole runs on GPUs with SGLang and vLLM: `moerl train` with one GPU in turn, a GPU each, and four for each of the two. Not run so far."""

from pathlib import Path

import pytest
import torch

from moerl.config.load import load
from moerl.doctor import smoke

ROOT = Path(__file__).parents[2]
EIGHT = smoke.Trial(
    check="eight GPUs",
    shows="two steps of four ranks, tensor and expert parallel; buckets by NCCL to a server of four",
    gpus=8,
    overrides=("train.layout={ranks: 4, tp: 2, ep: 2}", "rollout.layout={gpus: 4, ep: 4}", "weights.transport=nccl"),
)
TRIALS = (*smoke.TRIALS, EIGHT)
NUM_GPUS = torch.cuda.device_count()


def environment(engine: str) -> Path:
    return ROOT / f".venv-{engine}" / "bin" / "python"


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: f"{trial.gpus}-gpus")
@pytest.mark.timeout(3600)  # engines compile kernels when they start for the first time
def test_a_run_trains_and_its_pushes_are_verified(trial, engine, monkeypatch):
    if trial.gpus > NUM_GPUS:
        pytest.skip(f"needs {trial.gpus} GPUs")
    if not environment(engine).exists():
        pytest.skip(f"needs make engines ENGINES={engine}")
    monkeypatch.setattr(smoke, "TRIALS", (trial,))
    recipe = load(["recipe=grpo-tiny-moe-1n2g-sync", f"rollout.engine={engine}", "deterministic=false"])
    (finding,) = smoke.smoke(recipe, num_gpus=NUM_GPUS)
    assert finding.verdict == "ok", finding.found
