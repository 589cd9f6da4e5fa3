"""Whether FP8 is on, with which recipe, and the delayed scales that are updated at the end of a forward and of a backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch.delayed import DelayedScales, update

_Autocast = tuple[bool, Recipe | None, Any]


class FP8GlobalStateManager:
    """Transformer Engine's name and its class-wide state, as Megatron asks it."""

    _state: _Autocast = (False, None, None)
    _depth = 0
    _is_first_module = False
    _delayed: dict[int, tuple[DelayedScales, Any]] = {}

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls._state[0]

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Of the innermost autocast; Transformer Engine's default outside of any."""
        recipe = cls._state[1]
        return DelayedScaling() if recipe is None else recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls._state[2]

    @classmethod
    def get_fp8_autocast_state(cls) -> _Autocast:
        return cls._state

    @classmethod
    def set_fp8_autocast_state(cls, state: _Autocast) -> None:
        cls._state = state

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True once per outermost autocast."""
        first, cls._is_first_module = cls._is_first_module, False
        return first

    @classmethod
    def register(cls, scales: DelayedScales) -> None:
        """From now on the scales are updated with those of the other modules, and reduced over the autocast's group."""
        cls._delayed[id(scales)] = (scales, cls.get_fp8_group())

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        update(cls._delayed.values(), forward=forward)

    @classmethod
    def reset(cls) -> None:
        cls._state, cls._depth, cls._is_first_module, cls._delayed = (False, None, None), 0, False, {}


@contextmanager
def fp8_autocast(enabled: bool = True, calibrating: bool = False, fp8_recipe: Recipe | None = None, fp8_group: Any = None,
                 _graph: bool = False) -> Iterator[None]:  # fmt: skip
    if calibrating or _graph:
        raise RuntimeError("FP8 calibration and CUDA graphs need Transformer Engine on a GPU")
    manager = FP8GlobalStateManager
    outer = manager.get_fp8_autocast_state()
    recipe = DelayedScaling() if fp8_recipe is None else fp8_recipe
    manager.set_fp8_autocast_state((enabled, recipe, fp8_group))
    manager._is_first_module = manager._is_first_module if manager._depth else True
    manager._depth += 1
    try:
        yield
    finally:
        manager.set_fp8_autocast_state(outer)
        manager._depth -= 1
        if enabled and manager._depth == 0 and recipe.delayed() and torch.is_grad_enabled():
            manager.reduce_and_update_fp8_tensors(forward=True)


@contextmanager
def fp8_model_init(enabled: bool = True, **_: Any) -> Iterator[None]:
    if enabled:
        raise RuntimeError("FP8 parameters need Transformer Engine on a GPU; the reference keeps parameters in the model's dtype")
    yield
