"""Write slurm/*.sbatch: what `moerl launch --dry-run` prints for the recipes that people ask for, as examples to read and to submit.

    python tools/slurm_scripts.py

A test holds the files equal to this. They use .venv of the directory they are submitted from. Only convert.sbatch is written by hand.
"""

from pathlib import Path

from moerl.config.load import load
from moerl.slurm.job_script import render_eval, render_train

TRAIN = {
    "grpo_deepseek": ["recipe=grpo-deepseek-v3-32n8g-sync"],
    "grpo_qwen3_235b": ["recipe=grpo-qwen3-235b-16n8g-sync"],
    "dapo_qwen3_235b": ["recipe=dapo-qwen3-235b-16n8g-sync"],
    "dapo_deepseek": ["recipe=dapo-deepseek-v3-32n8g-sync"],
    "grpo_deepseek_fp8": ["recipe=grpo-deepseek-v3-fp8-32n8g-sync"],
    "grpo_qwen3_235b_async": ["recipe=grpo-qwen3-235b-32n8g-async"],
    "grpo_qwen3_235b_fp8_rollout": ["recipe=grpo-qwen3-235b-fp8-rollout-16n8g-sync"],
    "grpo_qwen3_30b": ["recipe=grpo-qwen3-30b-a3b-1n8g-sync"],
    "grpo_qwen3_0.6b": ["recipe=grpo-qwen3-0.6b-1n1g-sync"],
    "grpo_kimi_k2": ["recipe=grpo-kimi-k2-32n8g-sync"],
    "grpo_glm_4.5": ["recipe=grpo-glm-4.5-8n8g-sync"],
    "grpo_tiny_moe_cpu": [
        "recipe=grpo-tiny-moe-1n2g-sync", "slurm.gpus_per_node=0",
        "placement.mode=colocated", "placement.nodes=2", "placement.gpus_per_node=1", "train.offload=all",
    ],
}  # fmt: skip
EVAL = ["recipe=grpo-qwen3-235b-16n8g-sync", "eval=gym-chain-sum"]
PYTHON = "slurm.python=.venv/bin/python"


def scripts() -> dict[str, str]:
    """File name -> content."""
    train = {name: [*overrides, PYTHON] for name, overrides in TRAIN.items()}
    rendered = {name: render_train(load(overrides), overrides) for name, overrides in train.items()}
    words = [*EVAL, PYTHON]
    rendered["eval"] = render_eval(load(words), words)
    return {f"{name}.sbatch": text for name, text in rendered.items()}


def main() -> None:
    directory = Path(__file__).resolve().parent.parent / "slurm"
    directory.mkdir(exist_ok=True)
    for name, text in scripts().items():
        (directory / name).write_text(text)


if __name__ == "__main__":
    main()
