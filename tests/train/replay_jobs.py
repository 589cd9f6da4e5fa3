"""What the ranks of router replay's tests do."""

from typing import Any

import numpy as np
import torch
from engine_jobs import Trained, new_engine
from gate_jobs import _gradients

from moerl.algorithms.algorithm import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch
from moerl.types.stats import StepStats

OBJECTIVE = loss_of(algorithm("grpo"))


def record_disturb_train(settings: EngineSettings, batch: TrainBatch, num_steps: int = 1, factor: float = -1.0) -> Trained:
    """Record, multiply the routers' weights by `factor`, and update with the routes recorded before; `before_T` is of the recording."""
    engine, steps = new_engine(settings), []
    for _ in range(num_steps):
        before_T = engine.logprobs(batch, records_routes=True)
        _scale_routers(engine, factor)
        steps.append(engine.update(batch, OBJECTIVE, lr=1e-3, num_updates=settings.train.updates_per_step))
    weights = {name: tensor.float().numpy() for name, tensor in engine.export()}
    return Trained(before_T=before_T, after_T=engine.logprobs(batch), reference_T=None, steps=steps, weights=weights)


@torch.no_grad()
def _scale_routers(engine: Any, factor: float) -> None:
    for chunk in engine.model.chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith(".mlp.router.weight"):
                parameter.mul_(factor)
    engine.optimizer.reload_model_params()


def first_gradients(settings: EngineSettings, batch: TrainBatch) -> dict[str, np.ndarray]:
    """Of a first update, by the names of the checkpoint."""
    engine = new_engine(settings)
    gradients: dict[str, np.ndarray] = {}
    engine.optimizer.step = lambda: gradients.update(_gradients(engine))
    engine.update(batch, OBJECTIVE, lr=1e-3, num_updates=1)
    return gradients


def noted_and_replayed(settings: EngineSettings, batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of a pass that notes its routes, and of one over the same micro-batches that replays them."""
    engine = new_engine(settings)
    noting_T = engine.logprobs(batch, records_routes=True)
    given = engine.step.micro_batches
    engine.step.micro_batches = lambda share: engine.step.kept_routes.take(given(share))
    parts = map(batch.select, np.array_split(np.arange(batch.num_sequences), settings.train.updates_per_step))
    return noting_T, np.concatenate([engine.step.scores(part, engine.step.plan(part)) for part in parts])


def train_with_a_router_that_disobeys(settings: EngineSettings, batch: TrainBatch, layer: int) -> StepStats:
    """It sends every token to the first experts, whatever it is told."""
    engine = new_engine(settings)
    router = engine.model.chunks[0].decoder.layers[layer].mlp.router
    chooser = router.router_replay
    given = chooser.get_replay_topk

    def disobey(scores: Any, topk: int, *args: Any, **kwargs: Any) -> Any:
        given(scores, topk, *args, **kwargs)
        first = torch.arange(topk).expand(len(scores), topk)
        return scores.gather(1, first), first

    chooser.get_replay_topk = disobey
    return engine.update(batch, OBJECTIVE, lr=1e-3, num_updates=1)


def train_without_recording(settings: EngineSettings, batch: TrainBatch) -> StepStats:
    return new_engine(settings).update(batch, OBJECTIVE, lr=1e-3, num_updates=1)
