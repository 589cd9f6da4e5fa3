"""Memory in which a receiver puts tensors together that come in pieces.

A batch is on its way at once, and an embedding or output layer by itself has gigabytes in large models (docs/benchmarks.md), which a GPU
full of weights and caches has not. So a device lends no more than two buckets; the rest waits in host memory and crosses to it when whole.
"""

from math import prod

import torch

from moerl.types.push import TensorSpec
from moerl.weights.plan.tensor_specs import CPU, torch_dtype

DEVICE_BYTES = 2 * 256 * 2**20
"""Two buckets of weights.bucket_bytes as it is by default."""


class Assembly:
    """Memory of one push."""

    def __init__(self, *, device_bytes: int = DEVICE_BYTES):
        """`device_bytes`: at most so many are on a device at a time."""
        self._left = device_bytes

    def empty(self, spec: TensorSpec, device: torch.device) -> torch.Tensor:
        """Memory for the whole tensor, whose pieces arrive on `device`: there, or in host memory."""
        num_bytes = prod(spec.shape) * torch_dtype(spec).itemsize
        if device != CPU and num_bytes > self._left:
            device = CPU
        if device != CPU:
            self._left -= num_bytes
        return torch.empty(spec.shape, dtype=torch_dtype(spec), device=device)

    def free(self, whole: torch.Tensor) -> None:
        """It is installed."""
        if whole.device != CPU:
            self._left += whole.nbytes
