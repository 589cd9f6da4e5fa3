"""Weights that come in blocks of FP8, for a model that computes in another dtype on CPU.

The model gets what the pairs of values and scales stand for, so that what it installed cannot be compared with what was sent: a push's
digests are those of the pairs as they were received, and the model's bytes are compared with what those pairs come to.
"""

from collections.abc import Mapping

import torch

from moerl.models.fp8_blocks import dequantized
from moerl.models.fp8_names import SCALE_SUFFIX
from moerl.types.errors import WeightError
from moerl.types.push import TensorSpec
from moerl.weights.plan.fp8_pairs import FP8_DTYPE
from moerl.weights.verify.digest import tensor_digest
from moerl.weights.verify.places import Place, Start, copy_into, place_of_all


class FP8Weights:
    """`load` and `read` of a WeightSession. The pairs stay, for deltas on disk, and because in a push either half may come first. They are
    taken whole: a piece of either stands for nothing."""

    def __init__(self, views: Mapping[str, torch.Tensor], expected: Mapping[str, TensorSpec]):
        """`views`: of the model, by the names of checkpoints. `expected`: the same with pairs for what comes in FP8."""
        self._views, self._expected = views, expected
        self._received: dict[str, torch.Tensor] = {}

    def is_of_pair(self, name: str) -> bool:
        return self._expected[name.removesuffix(SCALE_SUFFIX)].dtype == FP8_DTYPE

    def load(self, name: str, start: Start, tensor: torch.Tensor) -> list[Place]:
        if not self.is_of_pair(name):
            return copy_into(self._views[name], start, tensor)
        self._received[name], values = tensor, name.removesuffix(SCALE_SUFFIX)
        # With one half of the push before it is overwritten when the other one comes.
        if values in self._received and values + SCALE_SUFFIX in self._received:
            self._install(values)
        return [place_of_all(tensor)]

    def read(self, name: str) -> torch.Tensor:
        return self._received[name] if name in self._received else self._views[name]

    def _install(self, name: str) -> None:
        view = self._views[name]
        value = torch.cat(list(dequantized(self._received[name], self._received[name + SCALE_SUFFIX], view.dtype)))
        if tensor_digest(view.copy_(value)) != tensor_digest(value):
            raise WeightError(f"tensor {name!r}: the model does not hold what its blocks of FP8 and their scales come to")
