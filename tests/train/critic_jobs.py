"""A critic on the ranks of a test."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from engine_jobs import new_engine

from moerl.algorithms.mini_batch_loss import ValueLossSettings
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch
from moerl.types.stats import StepStats


@dataclass(frozen=True, kw_only=True)
class TrainedCritic:
    fresh_T: np.ndarray
    """Values as a critic begins."""
    before_T: np.ndarray
    steps: list[StepStats]
    after_T: np.ndarray
    """Values after these."""


def train_critic(settings: EngineSettings, batch: TrainBatch, order: list[int], clip: float | None) -> TrainedCritic:
    """Two updates of a critic whose head was given weights. `order`: of the sequences as the engine gets them."""
    engine = new_engine(settings)
    batch, back = batch.select(order), np.argsort(order)

    def values() -> np.ndarray:
        return replace(batch, values_T=engine.values(batch)).select(back).values_T

    fresh_T = values()
    give_head(engine)
    before_T = values()
    near = replace(batch, values_T=engine.values(batch) + batch.values_T)
    steps = [engine.update(near, ValueLossSettings(clip=clip), lr=1e-3, num_updates=1) for _ in range(2)]
    return TrainedCritic(fresh_T=fresh_T, before_T=before_T, steps=steps, after_T=values())


def give_head(engine: object) -> None:
    for chunk in engine.model.chunks:
        if chunk.post_process:
            with torch.no_grad():
                chunk.output_layer.weight.copy_(head_weights(chunk.output_layer.weight.shape[1]))
    engine.optimizer.reload_model_params()


def head_weights(hidden_size: int) -> torch.Tensor:
    return torch.linspace(-1, 1, hidden_size, dtype=torch.float64)[None]
