"""The error of a patch that cannot be applied."""

import hashlib
import inspect
from collections.abc import Callable
from typing import Any


class PatchError(RuntimeError):
    """The upstream code a patch was written for is not what is installed."""


def require_source(function: Callable[..., Any], known: dict[str, str], patch: str) -> None:
    """Raise unless `function`'s source has one of the `known` digests (digest -> the version it was read in)."""
    digest = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    if digest not in known:
        name = f"{function.__module__}.{function.__qualname__}"
        raise PatchError(
            f"{patch}: {name} has changed (source digest {digest}; this patch knows {', '.join(known.values())}). "
            f"Read the new source, then mend or retire megatron_patches/{patch}.py, or install one of these versions."
        )
