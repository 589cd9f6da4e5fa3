"""What ranks do that save a model as the training loops of others save it: with Megatron's own writer, none of moerl's."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from engine_jobs import new_engine

from moerl.train.engine_settings import EngineSettings

FULLY_RESHARDABLE = "fully_reshardable"
DP_RESHARDABLE = "dp_reshardable"


def save_all(cases: list[tuple[EngineSettings, str, Path]]) -> None:
    """Each (settings, form of the optimizer's state, where): in the same processes."""
    from megatron.core import parallel_state

    for settings, sharding, directory in cases:
        save_as_others(settings, sharding, directory)
        parallel_state.destroy_model_parallel()


def save_as_others(settings: EngineSettings, sharding: str, directory: Path) -> None:
    """The state that Megatron-LM, and after it Megatron-Bridge and verl, put together, and how all of them save it.

    megatron/training/checkpointing.py (save_checkpoint, generate_state_dict), megatron/bridge/training/checkpointing.py, verl's
    utils/checkpoint/megatron_checkpoint_manager.py: the same metadata, wrapper and call; verl has an empty common part.
    """
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedObject
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    from moerl.train.checkpoint.sharded_state import begin_optimizer_state

    engine = new_engine(settings)
    begin_optimizer_state(engine.optimizer)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    content = {"distrib_optim_sharding_type": sharding, "singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    metadata = {**content, "distrib_optim_fully_reshardable_mem_efficient": False, "dp_cp_group": group}
    state: dict[str, Any] = {"args": Namespace(num_layers=4), "checkpoint_version": 3.0, "iteration": 1}
    chunks = engine.model.chunks
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    state |= {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)}
    state["optimizer"] = engine.optimizer.sharded_state_dict(state, metadata=metadata)
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    sizes = parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size()
    state["rng_state"] = ShardedObject("rng_state", [{}], sizes, place, replica_id=group.rank())
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), group)
    dist_checkpointing.save(state, str(directory), strategy, content_metadata=content)
