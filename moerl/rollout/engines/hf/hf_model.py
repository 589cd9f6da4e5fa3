"""The transformers model, and its parameters under the names a checkpoint uses.

transformers 5 holds all experts of a layer in two parameters, gate_up_proj [E, 2 * ffn, hidden] and down_proj [E, hidden, ffn];
checkpoints and weight pushes name each expert's matrices, which are views into those two.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moerl.models.bridge.native_bridge import copy_names, mtp_layers
from moerl.models.families.family_table import FAMILIES
from moerl.models.families.parts.family import Served
from moerl.models.find_family import find_family, has_family
from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.models.transformers_config import read_transformers_config, written_config
from moerl.rollout.engines.hf.cache import ATTENTION, attend
from moerl.rollout.engines.hf.delta_net import run_over_slots
from moerl.rollout.engines.hf.experts import EXPERTS, register_experts
from moerl.types.errors import EngineError
from moerl.types.push import TensorSpec
from moerl.weights.plan.fp8_pairs import in_fp8
from moerl.weights.plan.spec_tensors import spec_of

_FLOAT32_BUFFER = ".e_score_correction_bias"
"""Decides which experts are chosen; kept in float32 whatever the model's dtype (transformers does so only when it loads a file)."""


def load_model(
    model_dir: Path, *, dtype: torch.dtype, load: Literal["dummy", "checkpoint"], deterministic: bool, max_context: int
) -> PreTrainedModel:
    """dummy: random weights, to be replaced by a push. Raises EngineError for a model this engine cannot run."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    register_experts()
    config = _checked_config(model_dir, max_context)
    options = {"dtype": dtype, "attn_implementation": ATTENTION}
    if deterministic:
        options["experts_implementation"] = EXPERTS
    if load == "checkpoint":
        model = AutoModelForCausalLM.from_pretrained(model_dir, config=config, trust_remote_code=False, use_safetensors=True, **options)
    else:
        model = _random(config, **options)
    if find_family(written_config(config)).served.has_index:
        _as_trained(model)
    run_over_slots(model)
    return model.eval().requires_grad_(False)


def checkpoint_views(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every tensor of the model's checkpoint by name, as a view of the memory the model computes with. A tied lm_head is not in it."""
    views: dict[str, torch.Tensor] = {}
    served = find_family(written_config(model.config)).served
    state = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in state)
    for name, tensor in (*model.named_parameters(), *buffers):
        if ".mlp.experts." in name and not served.has_stacks:
            views |= _expert_views(name, tensor.data, served)
        else:
            views[name.replace(".mlp.", f".{served.block}.")] = tensor.data
    return views


def tensor_specs(views: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: spec_of(name, view) for name, view in views.items()}


def checkpoint_specs(model_dir: Path, dtype: torch.dtype, *, fp8: bool = False, with_mtp: bool = False) -> dict[str, TensorSpec]:
    """Tensors that a push to a model of `model_dir` must bring; allocates no weights. `fp8`: pairs for what comes in FP8. `with_mtp`: and
    those of its layers of multi-token prediction, without copies of the embedding and the output layer, which engines share."""
    config = _checked_config(model_dir, max_context=1)
    with torch.device("meta"):
        specs = tensor_specs(checkpoint_views(_random(config, dtype=dtype)))
    if with_mtp:
        specs |= _mtp_specs(model_dir, config, dtype)
    return in_fp8(specs.values()) if fp8 else specs


def _mtp_specs(model_dir: Path, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Specs from the checkpoint's headers: transformers does not build these layers."""
    layers = mtp_layers(model_dir, config.num_hidden_layers)
    copies = {name for rule in find_family(written_config(config)).rules for name in copy_names(rule, layers)}
    with HFCheckpoint(model_dir) as checkpoint:
        shapes = {name: checkpoint.shape(name) for names in layers.values() for name in sorted(names - copies)}
    kinds = {name: torch.float32 if name.endswith(_FLOAT32_BUFFER) else dtype for name in shapes}
    return {name: spec_of(name, torch.empty(shape, dtype=kinds[name], device="meta")) for name, shape in shapes.items()}


def _random(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config, **options)
    for name, buffer in model.named_buffers():
        if name.endswith(_FLOAT32_BUFFER):
            buffer.data = buffer.data.float()
    return model


def _as_trained(model: PreTrainedModel) -> None:
    """transformers norms latents with an eps of 1e-6 whatever config.json says, where Megatron, SGLang and vLLM take rms_norm_eps, and
    keeps a projection of each indexer in float32, which they have in the model's dtype."""
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps
        if name.endswith("indexer.weights_proj"):
            module.to(model.dtype)


def _expert_views(name: str, fused: torch.Tensor, served: Served) -> dict[str, torch.Tensor]:
    """`fused`: gate_up_proj or down_proj of all experts of a layer."""
    layer, projection = name.split(".mlp.experts.")
    gate, up, down = served.projections
    ffn = fused.shape[1] // 2
    parts = {gate: slice(0, ffn), up: slice(ffn, None)} if projection == "gate_up_proj" else {down: slice(None)}
    return {
        f"{layer}.{served.block}.experts.{expert}.{part}.weight": fused[expert, rows]
        for expert in range(len(fused))
        for part, rows in parts.items()
    }


def _checked_config(model_dir: Path, max_context: int) -> PretrainedConfig:
    written = json.loads((model_dir / "config.json").read_text())
    if not has_family(written):
        raise EngineError(
            f"model_type = {written.get('model_type')!r} of {model_dir}: must be one of {', '.join(FAMILIES)}; the hf engine has its own "
            "attention masks and expert layout, known only for these. Use another rollout.engine"
        )
    config = read_transformers_config(model_dir)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if (slides or getattr(config, "sliding_window", None) not in (None, 0)) and not find_family(written).served.has_windows:
        raise EngineError(
            f"sliding_window = {config.sliding_window} of {model_dir}: must be off; the hf engine has no windows for this family. "
            "Set it to null in config.json if max_context fits the window"
        )
    if max_context > config.max_position_embeddings:
        raise EngineError(
            f"model.max_context = {max_context}: must be at most {config.max_position_embeddings}, max_position_embeddings of {model_dir}; "
            "the model knows no later positions. Lower model.max_context"
        )
    return config
