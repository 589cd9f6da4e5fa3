"""What a rank does for the tests of bfloat16."""

from typing import Any

import numpy as np
import torch
from engine_jobs import new_engine, parameters

from moerl.algorithms.grpo import GRPO
from moerl.config.schema import GRPOConfig
from moerl.train.settings import EngineSettings
from moerl.types import TrainBatch


def many_tiny_steps(settings: EngineSettings, batch: TrainBatch, num_steps: int) -> tuple[float, float, float]:
    """Mean change of a master weight in one step, of a bfloat16 weight in one step, and its change after all of them as a share of
    what the masters changed."""
    engine = new_engine(settings)
    masters = _masters(engine)
    start, visible_start = _copies(masters), _copies(parameters(engine))
    engine.update(batch, GRPO(GRPOConfig()), lr=1e-6, num_updates=1)
    master_change, first_change = _change(masters, start), _change(parameters(engine), visible_start)
    for _ in range(num_steps - 1):
        engine.update(batch, GRPO(GRPOConfig()), lr=1e-6, num_updates=1)
    return master_change, first_change, _change(parameters(engine), visible_start) / _change(masters, start)


def _masters(engine: Any) -> list[torch.Tensor]:
    optimizers = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    masters = [master for o in optimizers for group in o.shard_fp32_from_float16_groups for master in group]
    assert masters
    assert all(master.dtype == torch.float32 for master in masters)
    return masters


def _copies(tensors: Any) -> list[torch.Tensor]:
    return [tensor.detach().float().clone() for tensor in tensors]


def _change(tensors: Any, before: list[torch.Tensor]) -> float:
    changes = [(tensor.detach().float() - old).abs().flatten() for tensor, old in zip(tensors, before, strict=True)]
    return float(torch.cat(changes).mean())


def summed_gradient(settings: EngineSettings, batch: TrainBatch, count: int) -> tuple[float, float]:
    """Relative errors of `count` equal micro-batches' gradient against `count` times one: as it is, and had it been added in bfloat16."""
    engine = new_engine(settings)
    gradients = []
    for repeats in (1, count):
        engine._plan = lambda _, repeats=repeats: [[[0]] * repeats]
        engine.optimizer.step = lambda: gradients.append(_gradient(engine))
        engine.update(batch, GRPO(GRPOConfig()), lr=1e-6, num_updates=1)
    one, many = gradients
    in_bfloat16 = torch.zeros_like(one, dtype=torch.bfloat16)
    for _ in range(count):
        in_bfloat16 += one.to(torch.bfloat16)
    return _error(many, one * count), _error(in_bfloat16.float(), one * count)


def _gradient(engine: Any) -> torch.Tensor:
    gradients = [parameter.main_grad for parameter in parameters(engine)]
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    return torch.cat([gradient.flatten() for gradient in gradients]).clone()


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))
