"""Between torch tensors and the plain `TensorSpec` that crosses processes."""

from collections.abc import Sequence

import torch

from moerl.types.errors import WeightError
from moerl.types.push import TensorSpec

CPU = torch.device("cpu")


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Raises WeightError for a name that this torch does not know as a dtype."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightError(f"{spec.name}: dtype = {spec.dtype!r} is no dtype of torch {torch.__version__}; use the same torch on both sides")
    return dtype


def view_as(data: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The uint8 [num_bytes(spec)] `data` as the tensor it holds, without a copy."""
    return data.view(torch_dtype(spec)).view(spec.shape)


def box_of(tensor: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """A view."""
    return tensor[tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))]
