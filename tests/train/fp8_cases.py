"""A checkpoint whose sizes every FP8 recipe accepts, cut by tp or ep up to 2, and settings for it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_cases
from safetensors.torch import load_file, save_file

from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ScratchModel
from moerl.config.schema.train_config import FP8Config, NoRecompute
from moerl.scratch_model import write_scratch_model
from moerl.train.engine_settings import EngineSettings

_WIDEN = 4


def write_fp8_checkpoint(directory: Path, *, num_layers: int = 2) -> Path:
    """Qwen3-MoE with matrices wide enough for attention, routing and experts to matter."""
    sizes = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "ffn_size": 128, "num_experts": 4}
    write_scratch_model(ScratchModel(family="qwen3_moe", num_layers=num_layers, **sizes), 32, directory, seed=0)
    file = directory / "model.safetensors"
    tensors = {name: tensor * _WIDEN if tensor.ndim > 1 else tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def fp8_settings(
    model_dir: Path, layout: Layout | None = None, *, recipe: str | None, dtype: str = "bfloat16", recompute: Any = None, **options: Any
) -> EngineSettings:
    """float32 around the FP8 products, which no run may have, is for comparisons: nothing else then rounds."""
    made = engine_cases.settings(model_dir, Layout() if layout is None else layout, dtype=dtype, micro_batch_tokens=512)
    fp8 = None if recipe is None else FP8Config(recipe=recipe, **options)  # type: ignore[arg-type]
    return replace(made, train=replace(made.train, fp8=fp8, recompute=NoRecompute() if recompute is None else recompute))
