"""The memory of a training rank by kind, moved to the host and back block by block.

Not by Megatron's own `offload_to_cpu`: it gives the optimizer new tensors, which cuts the shards of float32 parameters off their
buffers. On a CPU run device and host are the same memory; the accounting is the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from moerl.train.megatron.overlap import gather_parameters
from moerl.train.memory.blocks import Block
from moerl.train.memory.memory_states import KINDS, Bytes, Kind


class DeviceMemory:
    """The blocks of one rank, by kind."""

    def __init__(self, wrapped: Sequence[Any], optimizer: Any, reference: Sequence[Tensor] | None):
        """`wrapped`: model chunks in Megatron's DistributedDataParallel. `optimizer`: Megatron's, over them."""
        self._wrapped, self._optimizer = wrapped, optimizer
        buffers = [buffer for chunk in wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        assert not any(hasattr(buffer, "shared_buffer") for buffer in buffers), "MXFP8 parameters share their buffer with gradients"
        frozen = [each.data for chunk in wrapped for each in chunk.parameters() if not each.requires_grad]  # in no buffer
        self._blocks: dict[Kind, list[Block]] = {
            "parameters": _blocks((*(buffer.param_data for buffer in buffers), *frozen), is_kept=True),
            "gradients": _blocks((buffer.grad_data for buffer in buffers), is_kept=False),
            "optimizer": [],
            "reference": _blocks(reference if reference is not None else (), is_kept=True),
        }
        self._parameter_storages = {block.storage._cdata for block in self._blocks["parameters"]}

    def place(self, on_device: Iterable[Kind]) -> None:
        """Collective if parameters leave. Afterwards exactly `on_device` is there; copies of weights in FP8 only if nothing has left."""
        wanted = set(on_device)
        leaving = [kind for kind in KINDS if kind not in wanted]
        torch.cuda.synchronize()  # the hybrid optimizer has streams of its own
        if "gradients" in leaving:
            self._optimizer.zero_grad()  # shards of gradients, views of what is about to go
            self._drop_widened_gradients()
        if "parameters" in leaving:
            gather_parameters(self._wrapped)
        if leaving:
            self._drop_fp8_copies()
        self._find_optimizer_blocks()
        for kind in leaving:
            for block in self._blocks[kind]:
                block.leave()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for kind in wanted:
            for block in self._blocks[kind]:
                block.come_back()
        torch.cuda.synchronize()

    def bytes(self) -> dict[Kind, Bytes]:
        self._find_optimizer_blocks()
        return {
            kind: Bytes(device=sum(block.device_bytes for block in blocks), host=sum(block.host_bytes for block in blocks))
            for kind, blocks in self._blocks.items()
        }

    def _find_optimizer_blocks(self) -> None:
        """Adam makes its moments at the first step, and loading a checkpoint may replace them. Known blocks keep their host copies."""
        known = {block.storage._cdata: block for block in self._blocks["optimizer"]}
        found = {storage._cdata: storage for storage in map(Tensor.untyped_storage, self._optimizer_tensors())}
        self._blocks["optimizer"] = [
            known[key] if key in known else Block(storage, is_kept=True)
            for key, storage in found.items()
            if key not in self._parameter_storages
        ]

    def _drop_fp8_copies(self) -> None:
        """Transformer Engine makes them of a module's weights in its first micro-batch, and keeps them from then on (`_fp8_workspaces`,
        module/base.py); without them it makes them anew, whichever micro-batch it is."""
        for chunk in self._wrapped:
            for module in chunk.modules():
                getattr(module, "_fp8_workspaces", {}).clear()

    def _drop_widened_gradients(self) -> None:
        """The hybrid optimizer keeps float32 gradients of its masters on the device after a step, until it makes those of the next."""
        for hybrid in self._inner_optimizers():
            if isinstance(hybrid, HybridDeviceOptimizer) and hybrid.gpu_optimizer is not None:
                for parameter in _parameters(hybrid.gpu_optimizer):
                    parameter.grad = None

    def _inner_optimizers(self) -> Iterator[Any]:
        return (chained.optimizer for chained in self._optimizer.chained_optimizers if chained.optimizer is not None)

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Master weights and moments on the device; float32 parameters are their own master weights, in the parameter buffers. What the
        hybrid optimizer has in host memory stays there."""
        for inner in self._inner_optimizers():
            on_device = inner.gpu_optimizer if isinstance(inner, HybridDeviceOptimizer) else inner
            tensors = [parameter for each in (inner, on_device) if each is not None for parameter in _parameters(each)]
            states = () if on_device is None else on_device.state.values()
            tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
            device = torch.device(torch.cuda.current_device())
            yield from (tensor for tensor in tensors if tensor.device.type == device.type and tensor.dim() > 0)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _blocks(tensors: Iterable[Tensor], *, is_kept: bool) -> list[Block]:
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [Block(storage, is_kept=is_kept) for storage in storages.values()]
