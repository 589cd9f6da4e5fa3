"""What the ranks of a test do. Every function runs on every rank; rank 0's value goes to the test."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.models.hf_checkpoint import write_shards
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch
from moerl.types.push import TensorSpec
from moerl.types.stats import StepStats


@dataclass(frozen=True, kw_only=True)
class Trained:
    before_T: np.ndarray
    """Log-probs under the initial weights."""
    after_T: np.ndarray
    """Log-probs under the trained weights."""
    reference_T: np.ndarray | None
    """Log-probs under the reference, asked for at the end."""
    steps: list[StepStats]
    weights: dict[str, np.ndarray]
    """Exported at the end, as float32."""


def new_engine(settings: EngineSettings) -> Any:
    import megatron_patches
    from moerl.train.megatron.process_groups import initialize_groups
    from moerl.train.megatron_engine import MegatronEngine

    engine = MegatronEngine(settings, initialize_groups(settings.train.layout, 1, reloadable=settings.train.destroy_groups))
    megatron_patches.assert_active()
    return engine


def parameters(engine: Any) -> list[Any]:
    """Of every model chunk of this rank."""
    return [parameter for chunk in engine.model.chunks for parameter in chunk.parameters()]


def train(settings: EngineSettings, batch: TrainBatch, num_steps: int = 3, num_updates: int = 2) -> Trained:
    """GRPO steps, with a penalty on the distance from the reference if there is one."""
    engine = new_engine(settings)
    objective = loss_of(algorithm("grpo", f"kl_coefficient={0.1 if settings.uses_reference else 0.0}"))
    before_T = engine.logprobs(batch)
    steps = []
    for _ in range(num_steps):
        if settings.uses_reference:
            batch = replace(batch, reference_logprobs_T=engine.reference_logprobs(batch))
        steps.append(engine.update(batch, objective, lr=settings.train.optimizer.lr, num_updates=num_updates))
    return Trained(
        before_T=before_T,
        after_T=engine.logprobs(batch),
        reference_T=engine.reference_logprobs(batch) if settings.uses_reference else None,
        steps=steps,
        weights={name: tensor.float().numpy() for name, tensor in engine.export()},
    )


def attention_tokens_of(settings: EngineSettings) -> float:
    return new_engine(settings).step.planner.attention_tokens


def first_step(settings: EngineSettings, batch: TrainBatch) -> StepStats:
    return train(settings, batch, 1, 1).steps[0]


def clipped_updates(settings: EngineSettings, batch: TrainBatch, num_updates: int) -> tuple[int, float, list[float]]:
    """How often `num_updates` updates asked Megatron for a gradient's norm; their largest; and the norms after Megatron clipped them."""
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
    import megatron.core.optimizer.optimizer as optimizer

    norm_of, step = optimizer.get_grad_norm_fp32, distrib_optimizer.DistributedOptimizer.step_with_ready_grads
    asked, clipped = [], []

    def note(gradients: Any, **options: Any) -> float:
        asked.append(norm_of(gradients, **options))
        return asked[-1]

    def measure(self: Any) -> bool:
        clipped.append(self.get_grad_norm())
        asked.pop()  # this one
        return step(self)

    optimizer.get_grad_norm_fp32, distrib_optimizer.DistributedOptimizer.step_with_ready_grads = note, measure
    stats = train(settings, batch, 1, num_updates).steps[0]
    return len(asked), stats.grad_norm, clipped


def first_step_unpatched(settings: EngineSettings, batch: TrainBatch) -> StepStats:
    """With replicated experts left as Megatron marks them."""
    import moerl.train.megatron.megatron_model

    moerl.train.megatron.megatron_model._reduce_replicated_experts = lambda chunk, layout: None
    return first_step(settings, batch)


def export_to(settings: EngineSettings, directory: Path) -> tuple[list[str], list[TensorSpec]]:
    """Write every exported tensor; the bridge's names and the engine's specs of them."""
    engine = new_engine(settings)
    names, specs = engine.model.bridge.names(), engine.pushed.specs()
    if dist.get_rank() == 0:
        write_shards(engine.export(), directory, shard_bytes=20_000)
    else:
        assert list(engine.export()) == []
    return names, specs


# -- for the tests of engine_ranks itself --------------------------------------------------------------------------


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size)


def loaded(names: Sequence[str]) -> list[str]:
    return [name for name in names if name in sys.modules]


def session() -> int:
    return os.getsid(0)


def leave_a_child_behind(rank: int) -> None:
    """A child that would live for ever, and an error."""
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    fail_on_rank(rank)


def fail_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        _ = 1 / 0
    dist.barrier()


def die_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(1)
    threading.Event().wait()


def wait_for_ever_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


def attention_flags(settings: EngineSettings) -> dict[str, str | None]:
    """What Transformer Engine reads in the environment of a rank that has built its model."""
    new_engine(settings)
    return {name: os.environ.get(f"NVTE_{name}_ATTN") for name in ("FLASH", "FUSED", "UNFUSED")}
