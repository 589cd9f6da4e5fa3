"""Measurements of memory that ranks of the planner's tests make. Every function runs on every rank; rank 0's value goes to the test."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from engine_jobs import new_engine

from moerl.algorithms.grpo import GRPO
from moerl.config.schema.algorithm_config import GRPOConfig
from moerl.config.schema.train_config import TrainConfig
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch


def trained_bytes(settings: EngineSettings, batch: TrainBatch) -> list[dict[str, int]]:
    """Bytes of each rank after an update."""
    engine = new_engine(settings)
    engine.update(batch, GRPO(GRPOConfig()), lr=1e-3, num_updates=1)
    buffers = [buffer for chunk in engine.model.wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    optimizers = engine.optimizer.chained_optimizers
    states = [value for each in optimizers for state in each.optimizer.state.values() for value in state.values()]
    if settings.train.dtype == "bfloat16":
        states += [shard for each in optimizers for group in each.shard_fp32_from_float16_groups for shard in group if shard is not None]
    mine = {
        "rank": dist.get_rank(),
        "weights": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(state.nbytes for state in states if isinstance(state, torch.Tensor) and state.ndim > 0),
        "reference": 0 if engine._reference is None else sum(tensor.nbytes for tensor in engine._reference),
    }
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def built_sizes(cases: Sequence[tuple[Mapping[str, Any], TrainConfig, Sequence[int]]]) -> list[dict[tuple[int, int], Any]]:
    """Of stages of each case by (stage, chunk): elements of every parameter, of the buffers, and of a rank's shard of them. Megatron
    builds them on meta tensors, so that their size does not matter. Replaces the process's default group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    found = [_built(*case) for case in cases]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return found


def _built(hf: Mapping[str, Any], train: TrainConfig, stages: Sequence[int]) -> dict[tuple[int, int], tuple[list[int], int, int]]:
    from moerl.train.megatron.megatron_model import _wrap, build_chunks
    from moerl.train.megatron.on_meta import as_rank

    layout, found = train.layout, {}
    for stage in stages:
        with as_rank(stage * (layout.ranks // layout.pp), layout), torch.device("meta"):
            built = build_chunks(hf, train, max_context=32)
            for number, chunk in enumerate(built.chunks):
                wrapped = _wrap(built.config, train, chunk, is_first=number == 0)
                buffers = wrapped.buffers + wrapped.expert_parallel_buffers
                found[stage, number] = (
                    sorted(parameter.numel() for parameter in chunk.parameters()),
                    sum(buffer.numel for buffer in buffers),
                    sum(buffer.numel // buffer.data_parallel_world_size for buffer in buffers),
                )
    return found
