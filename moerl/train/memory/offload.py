"""The memory of a training rank by kind, moved to the host and back block by block.

Not by Megatron's own `offload_to_cpu`: it gives the optimizer new tensors, which cuts the shards of float32 parameters off their
buffers. On a CPU run device and host are the same memory; the accounting is the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
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
        """Collective if parameters leave. Afterwards exactly `on_device` is there."""
        wanted = set(on_device)
        leaving = [kind for kind in KINDS if kind not in wanted]
        if "gradients" in leaving:
            self._optimizer.zero_grad()  # shards of gradients, views of what is about to go
        if "parameters" in leaving:
            gather_parameters(self._wrapped)
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

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Master weights and moments on the device; float32 parameters are their own master weights, in the parameter buffers."""
        device = torch.device(torch.cuda.current_device())
        for chained in self._optimizer.chained_optimizers:
            inner = chained.optimizer
            if inner is None:
                continue
            tensors = [parameter for group in inner.param_groups for parameter in group["params"]]
            tensors += [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
            yield from (tensor for tensor in tensors if tensor.device.type == device.type and tensor.dim() > 0)


def _blocks(tensors: Iterable[Tensor], *, is_kept: bool) -> list[Block]:
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [Block(storage, is_kept=is_kept) for storage in storages.values()]
