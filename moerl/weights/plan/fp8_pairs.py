"""FP8 tensors of a push and their scales: two tensors, X.weight and X.weight_scale_inv, of which every piece of one travels with its own
of the other.

A piece of the scales has those of the blocks that begin in its piece of the values. However ranks and parts cut the values, these pieces of
the scales are disjoint and make them up, and a rank that has the values has the scales (train/push/block_scales.py). Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from moerl.models.fp8_blocks import BLOCK, SCALE_SUFFIX, is_quantized_when_published, scale_shape
from moerl.types.push import TensorSpec
from moerl.weights.plan.transfer_plan import PlannedTensor

FP8_DTYPE = "float8_e4m3fn"


def with_scales(tensors: Iterable[PlannedTensor]) -> list[PlannedTensor]:
    """The same with what is FP8 in a published checkpoint in FP8, each followed by its scales."""
    found: list[PlannedTensor] = []
    for tensor in tensors:
        pair = fp8_specs(tensor.spec)
        found.append(replace(tensor, spec=pair[0]))
        found += [replace(tensor, spec=scales, scales_of=tensor.name) for scales in pair[1:]]
    return found


def fp8_specs(spec: TensorSpec) -> list[TensorSpec]:
    """Specs of the FP8 tensor and its scales; only `spec` itself for a tensor that stays as it is."""
    if not is_quantized_when_published(spec.name, spec.shape):
        return [spec]
    scales = TensorSpec(name=spec.name + SCALE_SUFFIX, shape=scale_shape(spec.shape), dtype="float32")
    return [replace(spec, dtype=FP8_DTYPE), scales]


def in_fp8(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    """Specs that a server that takes FP8 expects, by name. `specs`: of the checkpoint in the rollout's dtype."""
    return {found.name: found for spec in specs for found in fp8_specs(spec)}


def is_ragged(shape: Sequence[int], dim: int | None, num_shards: int) -> bool:
    """Whether blocks lie across the edges of equal shards along `dim`."""
    return dim is not None and num_shards > 1 and shape[dim] // num_shards % BLOCK != 0
