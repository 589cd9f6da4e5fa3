"""Names of the FP8 recipes; building one raises, as the reference computes in the tensors' own precision."""

from typing import Any


class Recipe:
    """Base of all recipes."""


class DelayedScaling(Recipe):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("FP8 needs Transformer Engine on a GPU; the CPU reference has none")


class Format:
    E4M3 = "E4M3"
    HYBRID = "HYBRID"
