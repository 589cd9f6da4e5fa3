"""Make `import transformer_engine` find the plain PyTorch reference in megatron_patches/reference.

What breaks: Megatron's layer specs with the names every checkpoint uses are written for Transformer Engine, which needs
CUDA to import. Versions: every megatron-core. Can go: never on CPU. On a GPU it is correct and slow, and serves only if it is asked
for by name.
"""

import importlib
import logging
import sys
from pathlib import Path

import torch

from megatron_patches.errors import PatchError

NAME = "reference_te"
_DIRECTORY = str(Path(__file__).parent / "reference")
_log = logging.getLogger(__name__)


def needed() -> bool:
    return not torch.cuda.is_available()


def active() -> bool:
    module = sys.modules.get("transformer_engine")
    return module is not None and getattr(module, "__file__", "").startswith(_DIRECTORY)  # type: ignore[union-attr]


def apply() -> None:
    if "transformer_engine" in sys.modules:
        raise RuntimeError("transformer_engine was imported before megatron_patches.activate()")
    sys.path.insert(0, _DIRECTORY)
    import transformer_engine

    if not active():
        raise RuntimeError(f"transformer_engine came from {transformer_engine.__file__}, not from {_DIRECTORY}")
    if torch.cuda.is_available():
        _log.warning("train.reference_te: training runs on the slow PyTorch reference of Transformer Engine")


def require_real() -> None:
    """PatchError where a GPU has no Transformer Engine that can be imported, and the reference does not stand for it. Megatron would go on
    without a word, and fail elsewhere."""
    if needed() or active():
        return
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # of its libraries too
        raise PatchError(
            f"Transformer Engine cannot be imported, and this process has a GPU: {error}. "
            "Install it (make gpu), or ask for its slow PyTorch reference by name: train.reference_te=true"
        ) from error
