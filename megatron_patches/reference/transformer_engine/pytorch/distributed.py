"""Activation recomputation and RNG tracking hooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager


class CudaRNGStatesTracker:
    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()


def checkpoint(function: Any, *args: Any, distribute_saved_activations: bool = False, get_rng_state_tracker: Any = None,
               tp_group: Any = None, **kwargs: Any) -> Any:  # fmt: skip
    """`function(*args)` computed again in the backward pass, under the FP8 autocast of the first time."""
    from megatron.core.tensor_parallel import random

    state = FP8GlobalStateManager.get_fp8_autocast_state()
    _refuse_delayed()

    def run(*inputs: Any) -> Any:
        outer = FP8GlobalStateManager.get_fp8_autocast_state()
        FP8GlobalStateManager.set_fp8_autocast_state(state)
        try:
            return function(*inputs, **kwargs)
        finally:
            FP8GlobalStateManager.set_fp8_autocast_state(outer)

    return random.checkpoint(run, distribute_saved_activations, *args)


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    if activation_recompute:
        _refuse_delayed()
    yield


def is_fp8_activation_recompute_enabled() -> bool:
    return False


def _refuse_delayed() -> None:
    if FP8GlobalStateManager.is_fp8_enabled() and FP8GlobalStateManager.get_fp8_recipe().delayed():
        raise RuntimeError("recomputation under delayed scaling needs Transformer Engine on a GPU: the scales of the first pass are gone")
