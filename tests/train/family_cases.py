"""A tiny random checkpoint for every family and for what its config.json can vary, in the names of published ones."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moerl.models.families.family_table import FAMILIES
from moerl.models.transformers_config import read_transformers_config

VOCABULARY = 101
"""No tensor-parallel size divides it."""

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "initializer_range": 0.02, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
_SIGMOID_ROUTER = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
}  # fmt: skip
_QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "rms_norm_eps": 1e-6, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip
_INDEX = {"index_n_heads": 16, "index_head_dim": 8, "index_topk": 6}
_GLM = {**_SIGMOID_ROUTER, "head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1}

CASES: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16},
    "qwen2_moe": {"model_type": "qwen2_moe", **_QWEN_EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 20},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {"model_type": "qwen3_moe", **_QWEN_EXPERTS, "norm_topk_prob": False, "head_dim": 16},
    "qwen3_next": {
        "model_type": "qwen3_next", **_QWEN_EXPERTS, "norm_topk_prob": True, "head_dim": 16, "shared_expert_intermediate_size": 20,
        "partial_rotary_factor": 0.25, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama-3.1": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": _LLAMA3},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "deepseek_v3": {
        "model_type": "deepseek_v3", **_SIGMOID_ROUTER, **_LATENT, "n_group": 4, "topk_group": 2, "rope_scaling": _YARN,
        "num_nextn_predict_layers": 1,
    },
    "deepseek_v32": {
        "model_type": "deepseek_v32", **_SIGMOID_ROUTER, **_LATENT, **_INDEX, "n_group": 4, "topk_group": 2, "rope_scaling": _YARN,
        "num_nextn_predict_layers": 1,
    },
    "glm_moe_dsa": {"model_type": "glm_moe_dsa", **_SIGMOID_ROUTER, **_LATENT, **_INDEX, "indexer_rope_interleave": True},
    "kimi_k2": {
        "model_type": "kimi_k2", **_SIGMOID_ROUTER, **_LATENT, "routed_scaling_factor": 2.827, "first_k_dense_replace": 2,
        "rope_scaling": _YARN | {"beta_fast": 1.0, "beta_slow": 1.0},
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "attention_bias": True,
        "rope_theta": 1000.0, "max_position_embeddings": 96,
        "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "swiglu_limit": 0.5,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 24,
            "truncate": False,
        },
    },
    "minimax_m2": {
        "model_type": "minimax_m2", "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8,
        "qk_norm_type": "per_layer", "use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True,
    },
    "glm4_moe": {"model_type": "glm4_moe", **_GLM, "use_qk_norm": True, "num_nextn_predict_layers": 2},
    "glm4_moe-air": {"model_type": "glm4_moe", **_GLM, "use_qk_norm": False, "n_group": 4, "topk_group": 2},
}  # fmt: skip
"""Name -> what config.json says beside the sizes above."""
BUILT = [name for name, case in CASES.items() if not list(FAMILIES[case["model_type"]].broken_rules(_DECODER | case))]
"""Those that the installed version of Megatron has the layers of."""


def write_case(name: str, root: Path, **changes: Any) -> Path:
    """The directory of the checkpoint: matrices wide enough that every part moves the logits. `changes`: of config.json."""
    config, directory = {**_DECODER, **CASES[name], **changes}, root / name
    num_layers, num_mtp = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    _random_model(config | {"num_hidden_layers": num_layers + num_mtp}).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    for layer in range(num_layers, num_layers + num_mtp):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{part}.weight": torch.ones(config["hidden_size"]) for part in ("enorm", "hnorm", "shared_head.norm")}
        weights[f"{prefix}eh_proj.weight"] = torch.ones(config["hidden_size"], 2 * config["hidden_size"])
    _disturb(weights)
    for layer in range(num_layers, num_layers + num_mtp):
        weights[f"model.layers.{layer}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"model.layers.{layer}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _random_model(config: dict[str, Any]) -> PreTrainedModel:
    computed_as = FAMILIES[config["model_type"]].served.computed_as
    kind = config["model_type"] if computed_as is None else computed_as
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config | {"model_type": kind}), dtype=torch.float32)


def _disturb(weights: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        weights[name] = 0.2 * noise if tensor.ndim > 1 else tensor + 0.3 * noise
        if name.endswith(".A_log"):  # a memory of some tokens: what is left of one alone may vanish, and a norm would widen its rounding
            weights[name] = 0.3 * noise - 2


def transformers_logits(directory: Path, sequences: list[list[int]], zeroed: str = "") -> list[torch.Tensor]:
    """[length, vocabulary] of each, computed alone. `zeroed`: what the names of the parameters end with that are set to 0."""
    config = read_transformers_config(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32, experts_implementation="eager").eval()
    chosen = [tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if zeroed and name.endswith(zeroed)]
    assert bool(chosen) == bool(zeroed)
    for tensor in chosen:
        tensor.data.zero_()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([tokens])).logits[0] for tokens in sequences]
