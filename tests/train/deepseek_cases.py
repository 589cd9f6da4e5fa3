"""Tiny DeepSeek-V3 checkpoints in the shapes the family has, with experts' biases that matter and layers of multi-token prediction."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import ODD_VOCABULARY, settings
from safetensors.torch import load_file, save_file

from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ScratchModel
from moerl.models.families.deepseek_v3 import DEEPSEEK_V3
from moerl.scratch_model import write_scratch_model
from moerl.train.engine_settings import EngineSettings

_SCRATCH = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "head_dim": 8, "ffn_size": 16, "num_experts": 8, "experts_per_token": 4}
_YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"rope_scaling": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    "yarn-unscaled": {"rope_scaling": _YARN, "q_lora_rank": None},
    "odd": {"vocab_size": ODD_VOCABULARY, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2},
}
"""What each differs by from the scratch model. odd: no group limit, and a vocabulary that no tensor-parallel size divides."""


def write_deepseek(root: Path, *names: str) -> dict[str, Path]:
    """Directories by variant; without names all. Each has two layers of multi-token prediction."""
    chosen = names if names else tuple(VARIANTS)
    for name in chosen:
        write_scratch_model(ScratchModel(family="deepseek_v3", mtp_layers=2, **_SCRATCH), 32, root / name, seed=0)
        _change(root / name, VARIANTS[name])
        _disturb(root / name / "model.safetensors")
    return {name: root / name for name in chosen}


def slow(*values: Any) -> Any:
    """A parameter set that `make test` has no time for."""
    return pytest.param(*values, marks=pytest.mark.matrix)


def deepseek_settings(
    directory: Path, layout: Layout, *, mtp_loss: float = 0.0, megatron: dict[str, Any] | None = None, **options: Any
) -> EngineSettings:
    chosen = settings(directory, layout, **options)
    given = {} if megatron is None else megatron
    return dataclasses.replace(chosen, train=dataclasses.replace(chosen.train, mtp_loss=mtp_loss, megatron=given))


def require_megatron_for(directory):
    """Megatron 0.19 has no latent attention without compressed queries, and validation says so."""
    if list(DEEPSEEK_V3.broken_rules(json.loads((directory / "config.json").read_text()))):
        pytest.skip("not with this version of Megatron")


def _change(directory: Path, changes: dict[str, Any]) -> None:
    """Change config.json, and cut or repeat the tensors whose shapes follow from it."""
    file, weights = directory / "model.safetensors", load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    for name, tensor in list(weights.items()):
        if name.endswith(("embed_tokens.weight", "lm_head.weight", "head.weight")):
            weights[name] = tensor[: config["vocab_size"]].clone()
        if config["q_lora_rank"] is None and "self_attn.q_" in name:
            del weights[name]
            if "q_a_proj" in name:
                rows = config["num_attention_heads"] * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
                weights[name.replace("q_a_proj", "q_proj")] = tensor.repeat(rows // len(tensor), 1)
        if ".shared_experts." in name:
            weights[name] = tensor.repeat_interleave(config["n_shared_experts"], 1 if "down_proj" in name else 0)
        if name == "model.layers.1.input_layernorm.weight" and config["first_k_dense_replace"] == 2:
            weights |= {f"model.layers.1.mlp.{p}.weight": weights[f"model.layers.0.mlp.{p}.weight"].clone() for p in _PROJECTIONS}
    if config["first_k_dense_replace"] == 2:
        weights = {n: t for n, t in weights.items() if not n.startswith("model.layers.1.mlp.") or n.split(".")[4] in _PROJECTIONS}
    save_file(weights, file, metadata={"format": "pt"})


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _disturb(file: Path) -> None:
    """Wide matrices, norm weights and biases of all sizes; copies stay copies."""
    generator = torch.Generator().manual_seed(1)
    weights = load_file(file)
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            weights[name] = 0.3 * noise
        else:
            weights[name] = 0.2 * noise if tensor.ndim > 1 else tensor + 0.1 * noise
    for name in weights:
        if ".layers." in name and name.endswith("embed_tokens.weight"):
            weights[name] = weights["model.embed_tokens.weight"].clone()
        if name.endswith("shared_head.head.weight"):
            weights[name] = weights["lm_head.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
