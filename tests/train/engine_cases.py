"""Tiny checkpoints, settings and batches for real engines."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ScratchModel
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
from moerl.scratch_model import write_scratch_model
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch

FAMILIES = ("qwen3", "qwen3_moe")
ODD_VOCABULARY = 101
"""No tensor-parallel size divides it."""

LAYOUTS = {
    "dp2": Layout(ranks=2),
    "tp2": Layout(ranks=2, tp=2),
    "ep2": Layout(ranks=2, ep=2),
    "tp2-etp2": Layout(ranks=2, tp=2, etp=2),
    "tp2-ep2": Layout(ranks=2, tp=2, ep=2),
    "ep4": Layout(ranks=4, ep=4),
    "tp2-ep2-dp2": Layout(ranks=4, tp=2, ep=2),
    "tp2-ep2-etp2-dp2": Layout(ranks=4, tp=2, ep=2, etp=2),
    "pp2": Layout(ranks=2, pp=2),
    "pp2-vpp2": Layout(ranks=2, pp=2, vpp=2),
    "cp2": Layout(ranks=2, cp=2),
    "cp4": Layout(ranks=4, cp=4),
    "cp2-ep2": Layout(ranks=2, cp=2, ep=2),
    "tp2-cp2": Layout(ranks=4, tp=2, cp=2),
    "pp2-first3": Layout(ranks=2, pp=2, first_stage_layers=3),
    "pp3-first1-last1": Layout(ranks=3, pp=3, first_stage_layers=1, last_stage_layers=1),
    "pp3-counted": Layout(ranks=3, pp=3, embedding_as_layer=True, loss_as_layer=True),
    "tp2-pp2-ep2-dp2": Layout(ranks=8, tp=2, pp=2, ep=2),
    "tp2-pp2-vpp2-cp2-ep4": Layout(ranks=8, tp=2, pp=2, vpp=2, cp=2, ep=4),
}
DENSE_LAYOUTS = ("dp2", "tp2", "pp2-vpp2", "cp2", "tp2-cp2")

_SCRATCH = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 16}
_TRANSFORMERS = {
    "vocab_size": ODD_VOCABULARY, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 32, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": False, "decoder_sparse_step": 1}
_WIDEN = 10
"""With the usual initial range of 0.02 attention, routing and the experts would hardly move log-probs and gradient norms."""


def write_checkpoints(root: Path) -> dict[str, Path]:
    """Directories by name. qwen3, qwen3_moe: scratch models, tied embeddings. untied-*: as transformers 5 writes them, odd vocabulary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for family in FAMILIES:
        write_scratch_model(ScratchModel(family=family, **_SCRATCH), 32, root / family, seed=0)
        config = AutoConfig.for_model(family, **_TRANSFORMERS, **(_EXPERTS if family == "qwen3_moe" else {}))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(root / f"untied-{family}")
    directories = {directory.name: directory for directory in root.iterdir()}
    for directory in directories.values():
        _disturb(directory / "model.safetensors")
    return directories


def _disturb(file: Path) -> None:
    """Wider matrices, and norm weights that are not all 1."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor * _WIDEN if tensor.ndim > 1 else tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def settings(model_dir: Path, layout: Layout, *, micro_batch_tokens: int = 64, dtype: str = "float32", **options: Any) -> EngineSettings:
    # With a smaller eps Adam would turn the rounding of a vanishing gradient into a whole step.
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-4, weight_decay=0.1)
    # Chunks shorter than a micro-batch.
    train = TrainConfig(optimizer=optimizer, layout=layout, dtype=dtype, micro_batch_tokens=micro_batch_tokens, logprob_chunk_tokens=24)
    defaults = {"max_context": 32, "temperature": 1.0, "uses_reference": False, "export_dtype": dtype}
    return EngineSettings(train=train, model_dir=model_dir, **(defaults | options))


def random_batch(*, num_sequences: int = 13, vocab_size: int = 90, with_servers: bool = False) -> TrainBatch:
    """Sequences of 4 to 19 tokens whose first two are the prompt; log-probs near uniform. Servers: two, and tokens of neither."""
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(4, 20, size=num_sequences))])
    total = int(offsets[-1])
    mask_T = np.ones(total, dtype=bool)
    for start in offsets[:-1]:
        mask_T[start : start + 2] = False
    return TrainBatch(
        token_ids_T=rng.integers(5, vocab_size, size=total),
        response_mask_T=mask_T,
        rollout_logprobs_T=(rng.normal(size=total) * 0.01 - 4.5).astype(np.float32),
        advantages_T=rng.normal(size=total).astype(np.float32),
        offsets=offsets,
        server_T=np.where(mask_T, np.arange(total) // 7 % 3 - 1, -1).astype(np.int16) if with_servers else None,
    )
