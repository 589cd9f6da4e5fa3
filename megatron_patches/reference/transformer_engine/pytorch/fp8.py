"""Whether FP8 is on, and with which recipe."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformer_engine.common.recipe import Float8CurrentScaling, Recipe


class FP8GlobalStateManager:
    recipe: Recipe | None = None
    """Of the innermost fp8_autocast; None where FP8 is off."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> Recipe | None:
        return cls.recipe

    @classmethod
    def reset(cls) -> None:
        cls.recipe = None


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Recipe | None = None, **_: Any) -> Iterator[None]:
    """Linear layers inside compute on FP8 operands; `enabled=False` inside switches it off."""
    before = FP8GlobalStateManager.recipe
    chosen = Float8CurrentScaling() if fp8_recipe is None else fp8_recipe
    FP8GlobalStateManager.recipe = chosen if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = before


@contextmanager
def fp8_model_init(enabled: bool = False, **_: Any) -> Iterator[None]:
    if enabled:
        raise RuntimeError("FP8 parameters are not in the reference transformer_engine")
    yield
