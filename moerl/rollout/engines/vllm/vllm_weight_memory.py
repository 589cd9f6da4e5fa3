"""Which tensors of vLLM's model a push brings, and which lie in the memory that goes with its weights (0.32)."""

from bisect import bisect
from collections.abc import Iterable, Iterator

import torch
from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

from moerl.rollout.engines.installed_bytes import memory_of

_ABSORBED = ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep")
"""Matrices of latent attention, which vLLM computes of `kv_b_proj` at the end of every reload (layers/attention/mla_attention.py)."""


def sent(models: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Tensors that hold what a push brought. Of a layer that checkpoints have a tensor of, a reload writes every parameter."""
    for model in models:
        for layer in model.modules():
            loaded, _ = get_layerwise_info(layer).restore_metadata
            if any(_is_sent(*each) for each in loaded.items()):
                yield from (each for name, each in layer._parameters.items() if each is not None and _is_sent(name, each))
            yield from (each for name in _ABSORBED if isinstance(each := getattr(layer, name, None), torch.Tensor))


def _is_sent(name: str, parameter: torch.Tensor) -> bool:
    return name not in SKIP_LOAD_TENSORS and not isinstance(parameter, KVCacheScaleParameter)


def in_weights_memory(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Those of `tensors` that sleep takes with the weights."""
    from vllm.device_allocator.cumem import CuMemAllocator

    found = CuMemAllocator.get_instance().pointer_to_data
    spans = sorted((start, start + data.handle[1]) for start, data in found.items() if data.tag == "weights")
    for each in tensors:
        at = memory_of(each)
        before = bisect(spans, (at, float("inf"))) - 1
        if before >= 0 and at < spans[before][1]:
            yield each
