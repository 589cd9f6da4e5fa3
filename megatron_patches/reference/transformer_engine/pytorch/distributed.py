"""Activation recomputation and RNG tracking hooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CudaRNGStatesTracker:
    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()


def checkpoint(*_: Any, **__: Any) -> Any:
    raise RuntimeError("te checkpoint serves FP8 recomputation, which needs Transformer Engine on a GPU")


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    yield


def is_fp8_activation_recompute_enabled() -> bool:
    return False
