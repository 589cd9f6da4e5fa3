"""config.json of families that the native table lacks, as published ones say it, and tiny checkpoints of them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from moerl.config.derive.scratch_config import VOCAB_SIZE

_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "initializer_range": 0.02, "tie_word_embeddings": False, "attention_dropout": 0.0,
}  # fmt: skip
_YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
    "mscale_all_dim": 0.707,
}  # fmt: skip
OPENED: dict[str, dict[str, Any]] = {
    "mistral": {
        **_DECODER, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "head_dim": 16, "sliding_window": None,
    },
    "olmoe": {
        **_DECODER, "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "num_key_value_heads": 4, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": False, "attention_bias": False, "clip_qkv": None, "rope_scaling": None,
        "router_aux_loss_coef": 0.01, "output_router_logits": False,
    },
    "deepseek_v2": {
        **_DECODER, "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax",
        "topk_method": "greedy", "routed_scaling_factor": 1.0, "attention_bias": False, "rope_scaling": _YARN, "rope_theta": 10000,
        "aux_loss_alpha": 0.001, "seq_aux": True,
    },
}  # fmt: skip


def write_opened(name: str, root: Path, **changes: Any) -> Path:
    """The directory of a random checkpoint, whose matrices are wide enough that every part moves the logits."""
    config, directory = OPENED[name] | changes, root / name
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    weights = load_file(directory / "model.safetensors")
    for key, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        weights[key] = 0.2 * noise if tensor.ndim > 1 else tensor + 0.3 * noise
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
