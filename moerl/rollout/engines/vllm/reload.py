"""vLLM's layerwise reload (vllm/model_executor/model_loader/reload, 0.32): weights that come anew, with what it lacks for a push."""

from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

from moerl.rollout.engines.installed_bytes import memory_of
from moerl.types.errors import WeightError
from moerl.weights.plan.tensor_specs import first_few


def begin_reload(model: torch.nn.Module, *, on_cpu: bool) -> None:
    """From here until `finish_reload` the model cannot compute. May follow one that was never finished."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():  # it has a part of its tensors
            _place_kernel_tensors(layer, info)
            info.reset()
        method: Any = getattr(layer, "quant_method", None)
        if on_cpu and getattr(method, "moe_kernel", None) is not None:
            # Else vLLM takes the experts for repacked already, and repacks them no more (UnquantizedFusedMoEMethod._setup_kernel).
            method.moe_kernel = None
    initialize_layerwise_reload(model)


def check_reached(model: torch.nn.Module) -> None:
    """WeightError for the model's parameters that got nothing. Before the end of vLLM's reload, which fills them with their old values."""
    reached, missed = set[int](), dict[str, int]()
    for layer_name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        in_progress = info.can_load()
        loaded = {name for name, _ in info.loaded_weights} | SKIP_LOAD_TENSORS
        # In progress the layer's own tensors are placeholders.
        kernels = info.kernel_tensors[0] if in_progress and info.kernel_tensors is not None else layer._parameters
        for name in layer._parameters:
            memory = 0 if kernels.get(name) is None else memory_of(kernels[name])
            if in_progress and name not in loaded and layer._parameters[name] is not None:
                missed[f"{layer_name}.{name}"] = memory
            else:
                reached.add(memory)
    # An output layer that is tied to the embedding has its memory; what was repacked has none.
    if names := [name for name, memory in missed.items() if memory == 0 or memory not in reached]:
        raise WeightError(
            f"{len(names)} parameters of the engine's model got nothing of the push: {first_few(names)}. It has more of them than "
            "the checkpoint, or its loader lost some; it would compute with values nobody sent"
        )


def finish_reload(model: torch.nn.Module, model_config: Any, *, on_cpu: bool) -> None:
    finalize_layerwise_reload(model, model_config)
    for module in model.modules() if on_cpu else ():
        if isinstance(module, ParallelLMHead):
            # Tied to the embedding it gets no tensor of its own, and vLLM leaves its packed copy as it was.
            module.quant_method.process_weights_after_loading(module)
