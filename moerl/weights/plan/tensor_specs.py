"""Tensors of a push by their names, shapes and dtypes alone: without torch, as the driver plans."""

import math
import re
from collections import Counter
from collections.abc import Iterable

from moerl.types.errors import WeightError
from moerl.types.push import TensorSpec

_ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""By torch's names of dtypes: those of tensors in checkpoints."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def num_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * item_bytes(spec)


def item_bytes(spec: TensorSpec) -> int:
    """Raises WeightError for a dtype that no checkpoint has."""
    if spec.dtype not in _ITEM_BYTES:
        raise WeightError(f"{spec.name}: dtype = {spec.dtype!r} is no dtype of a weight; known are {', '.join(_ITEM_BYTES)}")
    return _ITEM_BYTES[spec.dtype]


def expert_of(name: str) -> int | None:
    """The number of the expert whose tensor this is, by its Hugging Face name."""
    match = _EXPERT.search(name)
    return None if match is None else int(match[1])


def manifest_difference(expected: Iterable[TensorSpec], offered: Iterable[TensorSpec]) -> str:
    """Differences of the two, as counts and the first names of each kind; empty if they agree."""
    offered = tuple(offered)
    want, have = {spec.name: spec for spec in expected}, {spec.name: spec for spec in offered}
    counts = Counter(spec.name for spec in offered)
    kinds = {
        "missing": [name for name in want if name not in have],
        "extra": [name for name in have if name not in want],
        "named more than once": [name for name, count in counts.items() if count > 1],
        "different": [
            f"{name} (model {_form(want[name])}, offered {_form(have[name])})" for name in want if name in have and want[name] != have[name]
        ],
    }
    return "; ".join(f"{len(found)} {kind}: {first_few(found)}" for kind, found in kinds.items() if found)


def first_few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _form(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
