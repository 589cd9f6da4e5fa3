"""FP8 state: always off."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FP8GlobalStateManager:
    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> None:
        return None

    @classmethod
    def reset(cls) -> None: ...


@contextmanager
def fp8_autocast(enabled: bool = False, **_: Any) -> Iterator[None]:
    if enabled:
        raise RuntimeError("FP8 needs Transformer Engine on a GPU; the CPU reference has none")
    yield


@contextmanager
def fp8_model_init(enabled: bool = False, **_: Any) -> Iterator[None]:
    if enabled:
        raise RuntimeError("FP8 needs Transformer Engine on a GPU; the CPU reference has none")
    yield
