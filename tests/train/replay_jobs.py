"""What the ranks of router replay's tests do."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from engine_jobs import Trained, new_engine
from gate_jobs import _gradients

from moerl.algorithms.columns import TokenColumns, TokenLoss
from moerl.algorithms.mini_batch_loss import loss_of
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
    engine.step.micro_batches = lambda share: engine.step.kept_routes.given(given(share))

    def replaying(part: TrainBatch) -> np.ndarray:
        scores_T = engine.step.scores(part, engine.step.plan(part))
        engine.step.kept_routes.drop()
        return scores_T

    parts = map(batch.select, np.array_split(np.arange(batch.num_sequences), settings.train.updates_per_step))
    return noting_T, np.concatenate([replaying(part) for part in parts])


@dataclass
class Remembering:
    """An objective that keeps the log-probs it chooses by and those it is then asked with, of each mini-batch, sorted."""

    chosen_by: list[np.ndarray]
    asked_with: list[np.ndarray]
    needs = frozenset({"whole_minibatch"})
    metric_names = ()

    def statistics(self, columns: TokenColumns) -> torch.Tensor:
        return columns.logp_T.detach()[None]

    def select(self, statistics_kN: torch.Tensor) -> torch.Tensor:
        self.chosen_by.append(np.sort(statistics_kN[0].numpy()))
        return statistics_kN[0] > statistics_kN[0].median()

    def token_loss(self, columns: TokenColumns) -> TokenLoss:
        self.asked_with.append(columns.logp_T.detach()[columns.mask_T].double().numpy())
        assert columns.selected_T is not None
        return TokenLoss(loss_T=-columns.logp_T * columns.selected_T, clipped_T=~columns.selected_T)


def select_under_replay(settings: EngineSettings, batch: TrainBatch) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Log-probs by which each mini-batch was chosen from; those of all in its update, sorted; and by routers that follow nothing."""
    engine, mode = new_engine(settings), settings.train.router_replay
    if mode == "trainer":
        engine.logprobs(batch, records_routes=True)
        _scale_routers(engine, -1.0)
    free_T = engine.logprobs(batch.without_routes())
    objective = Remembering(chosen_by=[], asked_with=[])
    loss = replace(OBJECTIVE, objective=objective, needs=objective.needs)
    engine.update(batch, loss, lr=0.0, num_updates=settings.train.updates_per_step)
    return objective.chosen_by, np.sort(np.concatenate(objective.asked_with)), np.sort(free_T[batch.response_mask_T])


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
