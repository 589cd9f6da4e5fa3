"""Megatron's optimizer from the settings."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from torch import nn

from moerl.config.schema.train_config import TrainConfig
from moerl.train.optimizer.muon import use_muon
from moerl.types.errors import ConfigError, Problem


def build_optimizer(train: TrainConfig, wrapped: Sequence[nn.Module]) -> MegatronOptimizer:
    """Raises ConfigError for the hybrid optimizer without a GPU."""
    fraction = train.optimizer.memory.cpu_fraction
    if fraction > 0 and not torch.cuda.is_available():
        # Megatron tells the parameters to offload by `is_cuda` (optimizer/cpu_offloading/hybrid_optimizer.py) and fails without any.
        path, reason = "train.optimizer.memory.cpu_fraction", "the optimizer's memory is the host's already"
        raise ConfigError([Problem(path=path, value=fraction, rule="needs a GPU", reason=reason, fix=f"{path}=0")])
    optimizer = get_megatron_optimizer(optimizer_config(train), list(wrapped), use_gloo_process_groups=False)
    if train.optimizer.muon is not None:
        use_muon(optimizer, wrapped, train.optimizer.muon)
    return optimizer


@contextmanager
def norm_known(optimizer: Any, grad_norm: float) -> Iterator[None]:
    """Context in which Megatron's step clips by `grad_norm`. It would compute it again: a pass over all gradients and a collective."""
    optimizer.get_grad_norm = lambda: grad_norm
    try:
        yield
    finally:
        del optimizer.get_grad_norm


class NoOptimizer:
    """Optimizer of a rank that does not train: it holds nothing, and an update is not among its verbs."""

    chained_optimizers: tuple[MegatronOptimizer, ...] = ()

    def reload_model_params(self) -> None:
        """There are no master weights."""

    def zero_grad(self) -> None:
        """There are no shards of gradients."""


def optimizer_config(train: TrainConfig) -> OptimizerConfig:
    settings, memory = train.optimizer, train.optimizer.memory
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=0.0 if settings.clip_grad is None else settings.clip_grad,
        bf16=train.dtype == "bfloat16",
        params_dtype=getattr(torch, train.dtype),
        use_distributed_optimizer=True,
        overlap_param_gather=train.overlap_param_gather,
        optimizer_cpu_offload=memory.cpu_fraction > 0,
        optimizer_offload_fraction=memory.cpu_fraction,
        overlap_cpu_optimizer_d2h_h2d=memory.cpu_overlap,
        use_precision_aware_optimizer=memory.precision_aware,
        # The remainders are the low bits of the master weights. A checkpoint that can be resharded would gather them alone.
        store_param_remainders=False,
        main_grads_dtype=getattr(torch, memory.main_grads_dtype),
        main_params_dtype=getattr(torch, memory.main_params_dtype),
        exp_avg_dtype=getattr(torch, memory.exp_avg_dtype),
        exp_avg_sq_dtype=getattr(torch, memory.exp_avg_sq_dtype),
    )
