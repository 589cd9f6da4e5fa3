"""What the ranks of a conversion's tests do."""

from pathlib import Path

import torch.distributed as dist
from checkpoint_jobs import load, save
from engine_jobs import new_engine

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.models.hf_checkpoint import write_shards
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch


def load_and_export(settings: EngineSettings, batch: TrainBatch, directory: Path, target: Path) -> float:
    """Train a step away from the model's weights, load, export; then the gradient norm of a step, which needs a working optimizer."""
    engine = new_engine(settings)
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-2, num_updates=1)
    load(engine, directory)
    tensors = engine.export()
    if dist.get_rank() == 0:
        write_shards(tensors, target, shard_bytes=10**9)
    for _ in tensors:
        pass
    return engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1).grad_norm


def load_all(cases: list[tuple[EngineSettings, Path, Path]], batch: TrainBatch) -> None:
    """Each (settings, checkpoint, where to export): like `load_and_export`, in the same processes."""
    from megatron.core import parallel_state

    for settings, directory, target in cases:
        load_and_export(settings, batch, directory, target)
        parallel_state.destroy_model_parallel()


def train_save_export(settings: EngineSettings, batch: TrainBatch, directory: Path, target: Path) -> list:
    """A step, a checkpoint, and the same weights as the engine exports them; what each rank wrote."""
    engine = new_engine(settings)
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-2, num_updates=1)
    written = save(engine, directory)
    tensors = engine.export()
    if dist.get_rank() == 0:
        write_shards(tensors, target, shard_bytes=10**9)
    for _ in tensors:
        pass
    return written
