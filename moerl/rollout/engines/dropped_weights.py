"""Memory of a model whose server drops the weights, because the next push brings them all: what goes, and what is kept.

A push brings the parameters that checkpoints have. Beside them there are rotary caches, scales of keys and values, maps of experts, and
constants of kernels, as buffers or as attributes of any object: they are kept in host memory. What an engine computes of the weights after
every push (the matrices that latent attention absorbs) is dropped like them.
"""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from moerl.rollout.engines.installed_bytes import memory_of

_NAN = 255
"""A byte of which all floating-point numbers are NaN, those of FP8 (e4m3fn) too."""


class UnsentTensors:
    """Host copies of tensors that no push brings, whose memory is about to go."""

    def __init__(self, tensors: Iterable[Tensor], sent: Iterable[Tensor]):
        """`sent`: comes by a push, or is computed of that; of `tensors` the others are kept, whole storages of them."""
        dropped = {memory_of(tensor) for tensor in sent}
        storages = {memory_of(tensor): tensor.untyped_storage() for tensor in tensors}
        self._kept = [(_bytes(each), _bytes(each).to("cpu", copy=True)) for at, each in storages.items() if at and at not in dropped]

    def restore(self) -> None:
        """At the same addresses, where captured graphs read them."""
        for memory, copy in self._kept:
            memory.copy_(copy)


class DroppedWeights:
    """Weights in this process's own memory, on CPU: it is given back, and comes again without what was in it."""

    def __init__(self, sent: Iterable[Tensor]):
        storages = {memory_of(tensor): tensor.untyped_storage() for tensor in sent}
        self._sizes = [(storage, storage.nbytes()) for at, storage in storages.items() if at and storage.resizable()]
        self.num_bytes = sum(size for _, size in self._sizes)
        for storage, _ in self._sizes:
            storage.resize_(0)

    def restore(self) -> None:
        """NaN everywhere, so that what a push does not bring shows."""
        for storage, size in self._sizes:
            storage.resize_(size)
            _bytes(storage).fill_(_NAN)


def live_tensors() -> Iterator[Tensor]:
    """Every tensor with memory that an object of Python holds."""
    for each in _objects():
        is_tensor = issubclass(type(each), Tensor) and not isinstance(each, FakeTensor)
        if is_tensor and each.layout == torch.strided and not each.is_meta and _has_memory(each):
            yield each


def _has_memory(tensor: Tensor) -> bool:
    """False for leftovers of tracing and compilation, which raise when they are asked."""
    try:
        memory_of(tensor)
    except (RuntimeError, ValueError):
        return False
    return True


def _objects() -> list[Any]:
    """Those that the collector knows. It names none that are frozen, as vLLM freezes what a worker has made when it has started
    (freeze_gc_heap in vllm/v1/worker/gpu_worker.py)."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.collect()  # or what is garbage by now would be frozen with the rest
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """uint8 [storage.nbytes()], of the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
