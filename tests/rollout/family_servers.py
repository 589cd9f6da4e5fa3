"""Families behind SGLang and vLLM: a tiny checkpoint of each, in sizes for which vLLM has CPU kernels, and who serves it on CPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from family_cases import CASES as _PUBLISHED
from family_cases import write_case
from tiny_servers import NATIVE_MAX_CONTEXT, VOCAB, Checkpoint

from moerl.models.families.family_table import FAMILIES
from moerl.rollout.engines.hf.hf_model import checkpoint_specs

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": NATIVE_MAX_CONTEXT,
}  # fmt: skip
_SMALLER = 0.75
"""Times the matrices of the cases: rounding passes 1e-5 with those, and with half of them a sample depends on its seed alone."""
_EXPERTS = {"moe_intermediate_size": 64}
_LATENT = {
    "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def _scaled(case: str) -> dict[str, Any]:
    """Engines know no position past the one that YaRN reaches."""
    rope = _PUBLISHED[case]["rope_scaling"]
    return {"rope_scaling": rope | {"original_max_position_embeddings": int(NATIVE_MAX_CONTEXT / rope["factor"])}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 32}),
    "deepseek_v3": ("deepseek_v3", _EXPERTS | _LATENT | _scaled("deepseek_v3")),
    "llama": ("llama-3.1", {}),
    "qwen2": ("qwen2-tied", {}),
    "qwen2_moe": ("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 64}),
    "mixtral": ("mixtral", {}),
    "glm4_moe": ("glm4_moe", _EXPERTS | {"head_dim": 32}),
    "kimi_k2": ("kimi_k2", _EXPERTS | _LATENT | {"first_k_dense_replace": 1} | _scaled("kimi_k2")),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 7.0} | _scaled("gpt_oss"),
    ),
}
"""From a model_type, the checkpoint's name too, to the case of tests/train/family_cases.py and what differs from it. vLLM has
gpt-oss' limit of 7 in its source."""

REFUSED = {
    ("sglang", "gpt_oss"): "GptOssForCausalLM requires one of ['triton', 'trtllm_mha', 'fa3', 'fa4', 'ascend', 'intel_amx', 'intel_xpu', "
    "'aiter'] attention backend",
}  # fmt: skip
"""What an engine says where its build for CPU has no such family, by engine and family."""
TRAINED = tuple(f"{engine}-{name}" for engine in ("sglang", "vllm") for name in CASES if (engine, name) not in REFUSED)
"""Engine and checkpoint of whole runs."""
NATIVE = tuple(kind for kind in TRAINED if kind.partition("-")[2] not in ("qwen3", "deepseek_v3"))
"""As NATIVE of tiny_servers.py, which has those."""
PARAMS = [pytest.param(kind, marks=[pytest.mark.engine, pytest.mark.matrix(kind)]) for kind in NATIVE]


def write_family(name: str, root: Path, **changes: Any) -> Checkpoint:
    """Its tensors are those that a server has: a push brings no layers of multi-token prediction. `changes`: of config.json."""
    case, of_family = CASES[name]
    computed_as = FAMILIES[name].served.computed_as
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name if computed_as is None else computed_as]
    directory = write_case(case, root, **{"architectures": [architecture], **SIZES, **of_family, **changes})
    weights = load_file(directory / "model.safetensors")
    for tensor in weights.values():
        tensor *= _SMALLER if tensor.ndim > 1 else 1.0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(directory=directory, tensors={each: weights[each] for each in checkpoint_specs(directory, torch.float32)})
