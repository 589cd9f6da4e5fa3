"""What the ranks of the tests of routers do."""

from typing import Any

import numpy as np
from engine_jobs import new_engine

from moerl.algorithms.grpo import GRPO
from moerl.config.schema import GRPOConfig
from moerl.train.settings import EngineSettings
from moerl.types import TrainBatch


def biases(settings: EngineSettings, batch: TrainBatch, num_updates: int = 1) -> tuple[Any, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Statistics of a step after a log-prob pass over one sequence many times, and every router's bias before and after it."""
    engine = new_engine(settings)
    before = _biases(engine)
    engine.logprobs(batch.select([0] * 100))
    stats = engine.update(batch, GRPO(GRPOConfig()), lr=1e-3, num_updates=num_updates)
    return stats, before, _biases(engine)


def _biases(engine: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in engine.export() if name.endswith("e_score_correction_bias")}
