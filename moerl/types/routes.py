"""Routes of a model as an array, and the mark of a route that nobody recorded.

numpy is imported by those who have arrays: checks of settings need the sizes alone.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape:
    """Sizes of a model's routes: in every layer with experts each token goes to `top_k` of `num_experts`."""

    num_layers: int
    """Layers with experts, in order; the others have no route."""
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The narrower of uint8 and uint16 that holds every expert and the mark of `is_unknown`.

        With 256 experts, as DeepSeek-V3 has, 255 is both: a token's experts differ, so that two or more entries of 255 are the mark.
        """
        import numpy as np

        num_held = np.iinfo(np.uint8).max + (self.top_k > 1)
        return np.dtype(np.uint8 if self.num_experts <= num_held else np.uint16)


def unknown_route(dtype: "np.dtype[Any]") -> int:
    """Value of all entries of a token's route when nobody recorded it."""
    return 2 ** (8 * dtype.itemsize) - 1


def is_unknown(routes: "np.ndarray") -> "np.ndarray":
    """bool [..., layers] of routes [..., layers, top_k]"""
    return (routes == unknown_route(routes.dtype)).all(axis=-1)
