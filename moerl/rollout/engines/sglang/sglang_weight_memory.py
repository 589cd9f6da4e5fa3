"""Tensors that SGLang's memory saver takes with the weights, and others that it makes of weights and keeps (0.5.23)."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moerl.rollout.engines.dropped_weights import live_tensors
from moerl.rollout.engines.installed_bytes import memory_of
from moerl.types.errors import WeightError

_ABSORBED = ("w_kc", "w_vc")
"""Matrices of latent attention, which SGLang computes of `kv_b_proj` at the end of a push (deepseek_common/deepseek_weight_loader.py)."""

_made: list["weakref.ref[torch.Tensor]"] = []
"""Tensors made in that memory."""


def prepare() -> None:
    """Patches SGLang in this process: what it makes beside the parameters of its models is noted."""
    from sglang.srt.utils import torch_memory_saver_adapter as adapter

    saver: Any = adapter._TorchMemorySaverAdapterReal
    saver.region = _noted(saver.region)


def _noted(region: Any) -> Any:
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    @contextmanager
    def noting(self: Any, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        if tag != GPU_MEMORY_TYPE_WEIGHTS or enable_cpu_backup:
            with region(self, tag, enable_cpu_backup):
                yield
            return
        before = {memory_of(each) for each in live_tensors()}
        with region(self, tag, enable_cpu_backup):
            yield
        _made.extend(weakref.ref(each) for each in live_tensors() if memory_of(each) not in before)

    return noting


def check_takes_weights(models: Iterable[torch.nn.Module]) -> None:
    """WeightError where SGLang's kernels keep what they made of the first weights, for which its own updates are refused."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error

    for model in models:
        if reason := _unsupported_derived_weight_cache_error(model):
            raise WeightError(f"SGLang would compute with its first weights after a push. {reason}")


def of_weights(device: torch.device) -> Iterator[torch.Tensor]:
    """Those that are still there, on that device."""
    return (each for ref in _made if (each := ref()) is not None and each.device.type == device.type)


def absorbed(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        yield from (each for name in _ABSORBED if isinstance(each := getattr(module, name, None), torch.Tensor))
