"""What a rank does with Megatron's hybrid optimizer on CPU, where some memory stands for the GPU's and some for the host's."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from engine_jobs import Trained, new_engine
from memory_jobs import _two_steps, doze, train_in_phases
from torch.overrides import TorchFunctionMode

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.config.schema.train_config import TrainConfig
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch


class TwoMemories(TorchFunctionMode):
    """Every tensor is on the GPU, but those that `cpu` has copied and what is made of these."""

    def __init__(self) -> None:
        super().__init__()
        self._on_host: dict[int, torch.Tensor] = {}
        """By the addresses of their storages, which are kept from others thereby."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:
            return not self._is_on_host(args[0])
        if func is torch.Tensor.cpu:
            return self._noted(args[0].clone())
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and args and isinstance(args[0], torch.Tensor) and self._is_on_host(args[0]):
            return self._noted(found)
        return found

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._on_host

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor:
        self._on_host[tensor.untyped_storage().data_ptr()] = tensor
        return tensor


@contextmanager
def hybrid() -> Iterator[TwoMemories]:
    """Context in which engines get the hybrid optimizer, which is refused without a GPU, as Megatron makes it with one."""
    from megatron.core.optimizer import get_megatron_optimizer

    from moerl.train.optimizer.optimizer import optimizer_config

    memories = TwoMemories()

    def build(train: TrainConfig, wrapped: Sequence[torch.nn.Module]) -> Any:
        with memories:
            return get_megatron_optimizer(optimizer_config(train), list(wrapped), use_gloo_process_groups=False)

    with patch("moerl.train.megatron_engine.build_optimizer", build):
        yield memories


def hybrid_in_phases(settings: EngineSettings, batch: TrainBatch, sleeps: bool) -> Trained:
    with hybrid():
        return train_in_phases(settings, batch, sleeps)


def hybrid_from_checkpoint(settings: EngineSettings, batch: TrainBatch, directory: Path) -> tuple[Any, Any]:
    """Two steps after a checkpoint: straight on, and again from it after a sleep."""
    from checkpoint_jobs import files_in, write

    with hybrid() as memories:
        engine = new_engine(settings)
        engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=2)
        engine.stage(copies=True)
        straight = _two_steps(engine, batch, sleeps=False)
        write(engine, directory)
        doze(engine)
        with memories:  # it tells parameters apart anew
            assert engine.load(directory, files_in(directory)) == []
        return straight, _two_steps(engine, batch, sleeps=True)


def hybrid_in_a_new_engine(settings: EngineSettings, batch: TrainBatch, directory: Path) -> Any:
    """The same two steps."""
    from checkpoint_jobs import files_in

    with hybrid() as memories:
        engine = new_engine(settings)
        with memories:
            assert engine.load(directory, files_in(directory)) == []
        return _two_steps(engine, batch, sleeps=False)


def hybrid_sizes(settings: EngineSettings, batch: TrainBatch) -> list[dict[str, int]]:
    """Storage bytes of what the hybrid optimizers hold, on the GPU and on the host: after an update, asleep, and awake again."""
    with hybrid():
        engine = new_engine(settings)
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    found = [_sizes(engine)]
    engine.sleep()
    found.append(_sizes(engine))
    engine.wake()
    engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=1)
    return [*found, _sizes(engine)]


def _sizes(engine: Any) -> dict[str, int]:
    inner = [chained.optimizer for chained in engine.optimizer.chained_optimizers]

    def of(tensors: Callable[[Any], Iterable[torch.Tensor]]) -> int:
        storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for one in inner for each in tensors(one)}
        return sum(storages.values())

    return {
        "moments on the host": of(lambda one: [value for each in one.cpu_optimizers for value in _moments(each)]),
        "masters on the host": of(lambda one: one.gpu_params_map_cpu_copy.values()),
        "moments on the GPU": of(lambda one: _moments(one.gpu_optimizer)),
        "masters on the GPU": of(lambda one: [parameter for group in one.param_groups for parameter in group["params"]]),
        "updated on the GPU": of(lambda one: [parameter for group in one.gpu_optimizer.param_groups for parameter in group["params"]]),
    }


def _moments(optimizer: Any) -> list[torch.Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
