"""Megatron-Core without CUDA, and fixes to Megatron-Core itself: one patch per file, each checking its own target.

`activate()` is the first thing a training process calls, before it imports Megatron; `assert_active()` is what it calls
after building its model. A patch module has: NAME, `needed()`, `apply()` (idempotent; raises PatchError when the upstream
code it was written for has changed) and `active()`.
"""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from megatron_patches import (
    alltoall_splits,
    cuda_stand_in,
    duplicated_linear,
    float64_gradients,
    lone_rank,
    mbridge_deepseek_weights,
    mbridge_latent_config,
    mbridge_rope_theta,
    megatron_bridge_scatter,
    mtp_recompute,
    reference_te,
    shared_exchange,
    uneven_gloo,
)
from megatron_patches.errors import PatchError

PATCHES: tuple[ModuleType, ...] = (
    cuda_stand_in,
    reference_te,
    alltoall_splits,
    shared_exchange,
    uneven_gloo,
    lone_rank,
    float64_gradients,
    duplicated_linear,
    mtp_recompute,
    mbridge_rope_theta,
    mbridge_latent_config,
    mbridge_deepseek_weights,
    megatron_bridge_scatter,
)
"""In order of application: the first two must precede the first import of Megatron."""

_LOGGERS = ("wandb", "torch.utils.tensorboard")
"""Modules that Megatron imports where it is installed, to log by it: a rank logs by neither, and both are 450 files and a second."""


def activate(*, with_reference: bool = False) -> tuple[str, ...]:
    """Apply every patch this process needs; returns their names. `with_reference`: the reference of Transformer Engine where there is a GPU
    too; otherwise PatchError if a GPU lacks the real one."""
    if with_reference and not reference_te.active():
        reference_te.apply()
    reference_te.require_real()
    for patch in PATCHES:
        if patch.needed() and not patch.active():
            patch.apply()
    return active_names()


@contextmanager
def quiet() -> Iterator[None]:
    """Context for imports of Megatron in a process that has a terminal: what they say that this machine lacks is not the user's concern.

    Besides warnings that is a message of PyTorch's, where a CUDA toolkit is installed and no GPU.
    """
    toolkit = logging.getLogger("torch.utils.cpp_extension")
    level = toolkit.level
    toolkit.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        toolkit.setLevel(level)


@contextmanager
def without_loggers() -> Iterator[None]:
    """Context in which Megatron finds nothing to log by, unless it has been imported already."""
    hidden = [name for name in _LOGGERS if name not in sys.modules]
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(hidden))  # None: Python's own way to say that there is none
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]


def active_names() -> tuple[str, ...]:
    """Names of those in force. Imports nothing: what is patched later than Megatron's import is not, before that."""
    asked = PATCHES if "megatron.core" in sys.modules else PATCHES[:2]
    return tuple(patch.NAME for patch in asked if patch.active())


def assert_active() -> None:
    """Raises PatchError if a patch this process needs is not in force (undone, or imported too late)."""
    missing = [patch.NAME for patch in PATCHES if patch.needed() and not patch.active()]
    if missing:
        raise PatchError(f"patches not in force: {', '.join(missing)}; call megatron_patches.activate() before importing megatron")
