"""What the ranks of Muon's tests do. Every function runs on every rank; rank 0's value goes to the test."""

from typing import Any

import numpy as np
import torch
from engine_jobs import new_engine
from torch import Tensor

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch

Weights = dict[str, np.ndarray]


def plain_and_real_steps(settings: EngineSettings, batch: TrainBatch) -> tuple[Weights, Weights]:
    """Weights under Megatron's names after three updates of one process; and those of a plain statement given the same gradients."""
    engine = new_engine(settings)
    named = {name: weight for chunk in engine.model.chunks for name, weight in chunk.named_parameters()}
    plain = {name: PlainWeight(name, weight.detach().clone()) for name, weight in named.items()}
    heads = engine.model.chunks[0].config
    step = engine.optimizer.step

    def note() -> Any:
        norm = engine.optimizer.get_grad_norm()
        scale = min(1.0, 1.0 / (norm + 1e-6))  # torch.nn.utils.clip_grad_norm_
        for name, weight in named.items():
            plain[name].update(weight.main_grad * scale, heads)
        return step()

    engine.optimizer.step = note
    for _ in range(3):
        engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    real = {name: weight.detach().numpy().copy() for name, weight in named.items()}
    return real, {name: each.value.numpy() for name, each in plain.items()}


class PlainWeight:
    def __init__(self, name: str, value: Tensor):
        self.name, self.value, self.steps = name, value, 0
        self.first, self.second = torch.zeros_like(value), torch.zeros_like(value)

    def update(self, gradient: Tensor, heads: Any, *, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        self.steps += 1
        if self.value.dim() != 2 or "embedding" in self.name or "output_layer" in self.name:
            if self.value.dim() > 1:
                self.value -= lr * weight_decay * self.value
            self.first = 0.9 * self.first + 0.1 * gradient
            self.second = 0.95 * self.second + 0.05 * gradient**2
            mean, square = self.first / (1 - 0.9**self.steps), self.second / (1 - 0.95**self.steps)
            self.value -= lr * mean / (square.sqrt() + 1e-4)
            return
        self.first = 0.95 * self.first + 0.05 * gradient
        step = 0.95 * self.first + 0.05 * gradient
        self.value -= lr * weight_decay * self.value
        for rows in self._matrices(heads):
            self.value[rows] -= lr * 0.2 * max(step[rows].shape) ** 0.5 * _near_orthogonal(step[rows])

    def _matrices(self, heads: Any) -> list[list[int]]:
        """Rows that are a matrix."""
        if "linear_qkv" not in self.name:
            return [list(range(len(self.value)))]
        queries, size = heads.num_attention_heads // heads.num_query_groups, heads.kv_channels
        kinds: list[list[int]] = [[], [], []]
        for row in range(len(self.value)):
            head = row // size % (queries + 2)
            kinds[max(0, head - queries + 1)].append(row)
        return kinds


def _near_orthogonal(step: Tensor) -> Tensor:
    left, values, right = torch.linalg.svd(step, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right
