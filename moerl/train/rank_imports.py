"""Imports of a training rank, in its order: for a rank, and for the process that ranks are forked from. None of it imports Ray."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron_patches
from moerl.train.rank_progress import watch_collectives

_LOGGERS = ("wandb", "torch.utils.tensorboard")
"""Modules that Megatron imports where it is installed, to log by it: a rank logs by neither, and both are 450 files and a second."""


def load_quietly() -> None:
    """Imports as `load` has them, in a process whose terminal is the user's."""
    with megatron_patches.quiet():
        load()


def load(*, with_reference: bool = False) -> None:
    """Where it has been called before, that is in a fork, it does nothing. `with_reference`: see `megatron_patches.activate`."""
    watch_collectives()
    with without_loggers():
        megatron_patches.activate(with_reference=with_reference)
        # The optimizer would import dynamo on its first use.
        for name in ("moerl.train.megatron_engine", "moerl.train.megatron.megatron_model", "torch._dynamo"):
            importlib.import_module(name)


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
