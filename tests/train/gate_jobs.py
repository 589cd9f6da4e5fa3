"""What the ranks of the equality gate do: measure everything a layout computes, for several ways to cut one batch into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from engine_jobs import new_engine, parameters

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.config.schema.layout import Layout
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch

NUM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The first `num_sequences` of the batch in `count` micro-batches per data-parallel rank."""

    name: str
    num_sequences: int
    count: int

    def plan(self, layout: Layout) -> list[list[list[int]]]:
        """In turn over the ranks; empty micro-batches where the schedule wants more."""
        bins = [list(range(self.num_sequences))[i :: layout.dp * self.count] for i in range(layout.dp * self.count)]
        missing = -self.count % layout.count_multiple
        return [bins[rank * self.count : (rank + 1) * self.count] + [[]] * missing for rank in range(layout.dp)]


def cuts(layout: Layout, most: int) -> list[Cut]:
    return [
        *(Cut(name=f"packed-{count}", num_sequences=most, count=count) for count in (1, 2, 4)),
        *(Cut(name=f"single-{count}", num_sequences=count * layout.dp, count=count) for count in (1, 2, 4)),
    ]


@dataclass(frozen=True, kw_only=True)
class Measured:
    loss: float
    grad_norm: float
    logprobs_T: np.ndarray
    entropy_T: np.ndarray
    gradients: dict[str, np.ndarray]
    """By Hugging Face name, whole."""
    weights: dict[str, np.ndarray]
    """After NUM_STEPS optimizer steps; empty if none were asked for."""


def measure(settings: EngineSettings, batch: TrainBatch, wanted: Sequence[Cut], trained: str = "") -> dict[str, Measured]:
    """By the cut's name. `trained`: the cut that optimizer steps are taken with, which cost as much as all else; none if empty."""
    engine = new_engine(settings)
    start = [parameter.detach().clone() for parameter in parameters(engine)]
    results = {}
    for cut in wanted:
        _reset(engine, start)
        engine.step.plan = engine.step.step_plan = lambda _, cut=cut: cut.plan(settings.train.layout)
        results[cut.name] = _measure(engine, batch.select(np.arange(cut.num_sequences)), trains=cut.name == trained)
    return results


def _measure(engine: Any, batch: TrainBatch, *, trains: bool) -> Measured:
    logprobs_T, entropy_T = engine.logprobs(batch), _entropies(engine, batch)
    gradients: dict[str, np.ndarray] = {}
    # The step itself would consume them: they are read when the optimizer is about to.
    apply, engine.optimizer.step = engine.optimizer.step, lambda: gradients.update(_gradients(engine))
    stats = engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    engine.optimizer.step = apply
    weights = {}
    if trains:
        for _ in range(NUM_STEPS):
            engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
        weights = _exported(engine)
    return Measured(
        loss=stats.loss, grad_norm=stats.grad_norm, logprobs_T=logprobs_T, entropy_T=entropy_T, gradients=gradients, weights=weights
    )


def _reset(engine: Any, start: list[torch.Tensor]) -> None:
    """Initial weights, an optimizer that has taken no step."""
    with torch.no_grad():
        for parameter, value in zip(parameters(engine), start, strict=True):
            parameter.copy_(value)
    for optimizer in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        optimizer.optimizer.state.clear()
        for group in optimizer.optimizer.param_groups:
            group.pop("step", None)
    engine.optimizer.reload_model_params()


def _entropies(engine: Any, batch: TrainBatch) -> np.ndarray:
    """Of every token, by the engine's own pass and reduction with the entropy in the place of the log-prob."""
    given = engine.step.token_logprobs
    engine.step.token_logprobs = lambda logits, micro: given(logits, micro)[::-1]
    try:
        return engine.logprobs(batch)
    finally:
        engine.step.token_logprobs = given


def _gradients(engine: Any) -> dict[str, np.ndarray]:
    """After the reduction each data-parallel rank holds its shard of a bucket: all shards, then whole tensors by their names."""
    for chunk in engine.model.wrapped:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                shards = list(bucket.grad_data.chunk(ranks.size()))
                pieces = [torch.empty_like(shard) for shard in shards]
                dist.all_gather(pieces, shards[ranks.rank()].clone(), group=ranks)
                torch.cat(pieces, out=bucket.grad_data)
    kept = [parameter.detach().clone() for parameter in parameters(engine)]
    with torch.no_grad():
        for parameter in parameters(engine):
            parameter.copy_(parameter.main_grad)
    gradients = _exported(engine)
    with torch.no_grad():
        for parameter, value in zip(parameters(engine), kept, strict=True):
            parameter.copy_(value)
    return gradients


def _parameters(engine: Any) -> list[torch.nn.Parameter]:
    return [parameter for chunk in engine.model.chunks for parameter in chunk.parameters()]


def _exported(engine: Any) -> dict[str, np.ndarray]:
    """By the bridge itself: the engine does not export in the middle of an update."""
    tensors = engine.model.bridge.export(dtype=engine.model.config.params_dtype)
    return {name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy().copy() for name, tensor in tensors}
