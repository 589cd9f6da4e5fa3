"""A training step on ranks of tests/gpu against the reference of Transformer Engine on CPU: log-probs, loss, entropy and gradients.

Rounding is not guessed: a rank may be off from the reference in float32 by no more than twice what the reference itself is in bfloat16,
or in FP8.
"""

import importlib.util
from pathlib import Path

import numpy as np
from device_ranks import run
from engine_cases import random_batch
from engine_ranks import run_ranks
from fp8_cases import fp8_settings, write_fp8_checkpoint
from gate_jobs import Cut, Measured, measure

from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ScratchModel
from moerl.scratch_model import write_scratch_model

SIXTEEN = random_batch(num_sequences=16)
PACKED = Cut(name="packed", num_sequences=16, count=2)
ROOM = 2.0
"""A kernel may round more often than the reference does, or in another order."""


def write_models(root: Path) -> dict[str, Path]:
    """Sizes for which Transformer Engine has kernels, in FP8 too; layers enough for two virtual stages of two."""
    latent = ScratchModel(family="deepseek_v3", hidden_size=128, num_layers=4, num_heads=4, head_dim=32, ffn_size=128, num_experts=8)
    write_scratch_model(latent, 32, root / "deepseek_v3", seed=0)
    return {"qwen3_moe": write_fp8_checkpoint(root / "qwen3_moe", num_layers=4), "deepseek_v3": root / "deepseek_v3"}


def check_step(model: Path, layout: Layout, fp8: str | None = None) -> None:
    exact, rounded = _on_cpu(model, "float32", None), _on_cpu(model, "bfloat16", fp8)
    has_real = importlib.util.find_spec("transformer_engine") is not None
    settings = fp8_settings(model, layout, recipe=fp8)
    found = run("gate_jobs:measure", layout.ranks, settings, SIXTEEN, [PACKED], reference_te=not has_real)[PACKED.name]
    allowed, seen = _distances(rounded, exact), _distances(found, exact)
    floor = 1e-3 if fp8 is None else 1e-2  # what is close by chance in one sum need not be in another
    assert {name: value for name, value in seen.items() if value > ROOM * allowed[name] + floor} == {}, (seen, allowed)
    assert allowed["gradients"] < (0.15 if fp8 is None else 0.35), "a reference this far off would show nothing"


def _on_cpu(model: Path, dtype: str, fp8: str | None) -> Measured:
    return run_ranks(measure, 1, fp8_settings(model, recipe=fp8, dtype=dtype), SIXTEEN, [PACKED])[PACKED.name]


def _distances(found: Measured, exact: Measured) -> dict[str, float]:
    """Relative to the size of what is compared; of all gradients together."""

    def off(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.linalg.norm(one - other) / np.linalg.norm(other))

    assert found.gradients.keys() == exact.gradients.keys()
    return {
        "log-probs": off(found.logprobs_T, exact.logprobs_T),
        "entropy": off(found.entropy_T, exact.entropy_T),
        "loss": abs(found.loss - exact.loss) / abs(exact.loss),
        "gradient norm": abs(found.grad_norm - exact.grad_norm) / exact.grad_norm,
        "gradients": off(*(np.concatenate([each.gradients[name].ravel() for name in exact.gradients]) for each in (found, exact))),
    }
