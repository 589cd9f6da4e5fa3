"""Activation recomputation and RNG tracking hooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint as recompute

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast


class CudaRNGStatesTracker:
    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()


def checkpoint(function: Any, *args: Any, distribute_saved_activations: bool = False, get_rng_state_tracker: Any = None,
               tp_group: Any = None, **kwargs: Any) -> Any:  # fmt: skip
    """Run `function` again in the backward pass, under the FP8 recipe of the forward pass. There is no dropout whose bits matter."""
    if distribute_saved_activations:
        raise RuntimeError("distribute_saved_activations is not in the reference transformer_engine")
    recipe = FP8GlobalStateManager.recipe

    def run(*again: Any, **options: Any) -> Any:
        with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            return function(*again, **options)

    return recompute.checkpoint(run, *args, use_reentrant=False, **kwargs)


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    yield


def is_fp8_activation_recompute_enabled() -> bool:
    return False
