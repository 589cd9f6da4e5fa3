"""Data-parallel communication beside computation: gradients reduced in the backward pass, parameters gathered in the next forward.

A gather that waits for the next forward pass leaves stale parameters behind an update: whoever reads them otherwise (export,
checkpoint, reference swap, offload) first calls `gather_parameters`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from moerl.config.schema.train_config import TrainConfig


def data_parallel_config(train: TrainConfig) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=train.dtype != "float64" and train.optimizer.memory.main_grads_dtype == "float32",
        overlap_grad_reduce=train.overlap_grad_reduce,
        overlap_param_gather=train.overlap_param_gather,
        bucket_size=train.overlap_bucket_size,
    )


def reduce_after_last_micro_batch(config: TransformerConfig, wrapped: Sequence[Any]) -> None:
    """Tell the schedules how to keep buckets from being reduced before their gradients are complete."""
    if wrapped[0].ddp_config.overlap_grad_reduce:
        contexts = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]


@torch.no_grad()
def gather_parameters(wrapped: Sequence[Any]) -> None:
    """Collective over data-parallel ranks: parameters are those of the last update on every rank. Nothing to do without the overlap."""
    for chunk in wrapped:
        if not chunk.ddp_config.overlap_param_gather:
            continue
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if group.param_gather_handle is not None:  # of this update, or of an earlier one that nobody waited for
                group.param_gather_handle.wait()
                group.param_gather_handle = None
            if not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)


@contextmanager
def without_grad_reduce(wrapped: Sequence[nn.Module]) -> Iterator[None]:
    """Backward passes inside add up this rank's own gradients and start no communication."""
    configs: list[Any] = [chunk.ddp_config for chunk in wrapped]
    before = [config.overlap_grad_reduce for config in configs]
    for config in configs:
        config.overlap_grad_reduce = False
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.overlap_grad_reduce = value
