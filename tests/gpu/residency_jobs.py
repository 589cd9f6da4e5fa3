"""What a rank does that goes through the states of its memory, and what CUDA's allocator says in each."""

from typing import Any

import torch
from engine_jobs import new_engine

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch


def three_steps(settings: EngineSettings, batch: TrainBatch, sleeps: bool) -> list[dict[str, Any]]:
    """A report of every step: allocated and free bytes by state, the engine's own accounting, loss and gradient norm."""
    engine = new_engine(settings)
    reports = []
    for _ in range(3):
        before_T = engine.logprobs(batch)
        scoring = _memory()
        stats = engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
        training, asleep = _memory(), None
        if sleeps:
            engine.sleep()
            asleep = _memory()
            engine.wake()
        reports.append({"scoring": scoring, "training": training, "asleep": asleep, "stats": stats, "before_T": before_T})
    return reports


def _memory() -> dict[str, int]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return {"allocated": torch.cuda.memory_allocated(), "free": torch.cuda.mem_get_info()[0]}
