"""What the ranks of router replay's tests do."""

from typing import Any

import numpy as np
import torch
from engine_jobs import Trained, new_engine

from moerl.algorithms.grpo import GRPO
from moerl.config.schema import GRPOConfig
from moerl.train.settings import EngineSettings
from moerl.types import TrainBatch


def record_disturb_train(settings: EngineSettings, batch: TrainBatch, num_steps: int = 1, factor: float = -1.0) -> Trained:
    """Record, multiply the routers' weights by `factor`, and update with the routes recorded before; `before_T` is of the recording."""
    engine, steps = new_engine(settings), []
    for _ in range(num_steps):
        before_T = engine.logprobs(batch, records_routes=True)
        _scale_routers(engine, factor)
        steps.append(engine.update(batch, GRPO(GRPOConfig()), lr=1e-3, num_updates=settings.train.updates_per_step))
    weights = {name: tensor.float().numpy() for name, tensor in engine.export()}
    return Trained(before_T=before_T, after_T=engine.logprobs(batch), reference_T=None, steps=steps, weights=weights)


@torch.no_grad()
def _scale_routers(engine: Any, factor: float) -> None:
    for chunk in engine.model.chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith(".mlp.router.weight"):
                parameter.mul_(factor)
    engine.optimizer.reload_model_params()


def replay_logprobs(settings: EngineSettings, batch: TrainBatch) -> np.ndarray:
    return new_engine(settings).logprobs(batch)


def config_of(settings: EngineSettings) -> Any:
    config = new_engine(settings).model.config
    names = ("moe_router_dtype", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type", "moe_router_bias_update_rate")
    return {name: getattr(config, name) for name in names}
