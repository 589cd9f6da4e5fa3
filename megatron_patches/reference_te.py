"""Make `import transformer_engine` find the plain PyTorch reference in megatron_patches/reference.

What breaks: Megatron's layer specs with the names every checkpoint uses are written for Transformer Engine, which needs
CUDA to import. Versions: every megatron-core. Can go: never on CPU. On a GPU it serves only when Transformer Engine is not
installed: correct, slow, and said so in the log.
"""

import importlib.util
import logging
import sys
from pathlib import Path

import torch

NAME = "reference_te"
_DIRECTORY = str(Path(__file__).parent / "reference")
_log = logging.getLogger(__name__)


def needed() -> bool:
    if not torch.cuda.is_available() or active():
        return True
    return importlib.util.find_spec("transformer_engine") is None


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
        _log.warning("Transformer Engine is not installed: training runs on its slow PyTorch reference")
