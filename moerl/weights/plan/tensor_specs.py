"""Between torch tensors and the plain `TensorSpec` that crosses processes."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from moerl.types.errors import WeightError
from moerl.types.push import TensorSpec

CPU = torch.device("cpu")

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Raises WeightError for a name that this torch does not know as a dtype."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightError(f"{spec.name}: dtype = {spec.dtype!r} is no dtype of torch {torch.__version__}; use the same torch on both sides")
    return dtype


def num_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * torch_dtype(spec).itemsize


def view_as(data: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The uint8 [num_bytes(spec)] `data` as the tensor it holds, without a copy."""
    return data.view(torch_dtype(spec)).view(spec.shape)


def box_of(tensor: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """A view."""
    return tensor[tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))]


def expert_of(name: str) -> int | None:
    """The number of the expert whose tensor this is, by its Hugging Face name."""
    match = _EXPERT.search(name)
    return None if match is None else int(match[1])


def manifest_difference(expected: Iterable[TensorSpec], offered: Iterable[TensorSpec], *, shown: int = 3) -> str:
    """Differences of the two, as counts and the first `shown` names of each kind; empty if they agree."""
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
    return "; ".join(f"{len(found)} {kind}: {first_few(found, shown)}" for kind, found in kinds.items() if found)


def first_few(names: Iterable[str], shown: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:shown]) + (", ..." if len(names) > shown else "")


def _form(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
