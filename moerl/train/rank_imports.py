"""Imports of a training rank, in its order: for a rank, and for the process that ranks are forked from. None of it imports Ray."""

import importlib

import megatron_patches
from moerl.train.rank_progress import watch_collectives


def load_quietly() -> None:
    """Imports as `load` has them, in a process whose terminal is the user's."""
    with megatron_patches.quiet():
        load()


def load(*, with_reference: bool = False) -> None:
    """Where it has been called before, that is in a fork, it does nothing. `with_reference`: see `megatron_patches.activate`."""
    watch_collectives()
    with megatron_patches.without_loggers():
        megatron_patches.activate(with_reference=with_reference)
        # The optimizer would import dynamo on its first use.
        for name in ("moerl.train.megatron_engine", "moerl.train.megatron.megatron_model", "torch._dynamo"):
            importlib.import_module(name)
