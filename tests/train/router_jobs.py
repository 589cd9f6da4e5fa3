"""What the ranks of the tests of routers do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from engine_jobs import new_engine
from gate_jobs import _gradients

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch

OBJECTIVE = loss_of(algorithm("grpo"))
Biases = dict[str, np.ndarray]


def biases(settings: EngineSettings, batch: TrainBatch, num_updates: int = 1, lr: float = 1e-3) -> tuple[Any, Biases, Biases]:
    """Statistics of a step after a log-prob pass over one sequence many times, and every router's bias before and after it."""
    engine = new_engine(settings)
    before = _biases(engine)
    engine.logprobs(batch.select([0] * 100))
    stats = engine.update(batch, OBJECTIVE, lr=lr, num_updates=num_updates)
    return stats, before, _biases(engine)


def _biases(engine: Any) -> Biases:
    return {name: tensor.numpy().copy() for name, tensor in engine.export() if name.endswith("e_score_correction_bias")}


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Of one update."""

    bins: list[list[int]]
    """Its micro-batches: sequences of the batch."""
    gates: dict[str, np.ndarray]
    """Of the routers, by the names of the checkpoint."""
    norm: float
    padding_fraction: float


def gradients(chosen: Sequence[EngineSettings], batches: Sequence[TrainBatch]) -> list[list[Gradients]]:
    """Of several models under one layout, on every batch. No weight is changed."""
    from moerl.train.megatron.process_groups import initialize_groups
    from moerl.train.megatron_engine import MegatronEngine

    initialize_groups(chosen[0].train.layout, 1)
    engines = map(MegatronEngine, chosen)
    return [[_gradients_of(engine, batch) for batch in batches] for engine in engines]


def _gradients_of(engine: Any, batch: TrainBatch) -> Gradients:
    found: dict[str, np.ndarray] = {}
    engine.optimizer.step = lambda: found.update(_gradients(engine))
    stats = engine.update(batch, OBJECTIVE, lr=1e-3, num_updates=1)
    return Gradients(
        bins=[members for rank in engine.step.plan(batch) for members in rank],
        gates={name: value for name, value in found.items() if name.endswith(".mlp.gate.weight")},
        norm=stats.grad_norm,
        padding_fraction=stats.padding_fraction,
    )


def last_router(settings: EngineSettings, batch: TrainBatch) -> tuple[Gradients, list[np.ndarray], np.ndarray]:
    """Of the last layer's router, whose gradient nothing after it adds to: what its tokens were in each micro-batch of every data-parallel
    rank, without padding, and its weight."""
    engine, inputs = new_engine(settings), []
    router, running = engine.model.chunks[-1].decoder.layers[-1].mlp.router, []
    routed = engine.step._routed
    engine.step._routed = lambda micro, **options: (running.append(micro), routed(micro, **options))[1]
    router.register_forward_hook(lambda _, args, __: inputs.append(args[0][running[-1].is_token_T, 0].detach().float().numpy()))
    found = _gradients_of(engine, batch)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, inputs)
    return found, [tokens for rank in everywhere for tokens in rank], router.weight.detach().float().numpy()
