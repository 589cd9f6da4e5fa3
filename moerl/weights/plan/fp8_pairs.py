"""Pairs of a push in FP8: values and the scales of their blocks, which travel together. Pure."""

from collections.abc import Iterable, Sequence

from moerl.models.fp8_names import BLOCK, SCALE_SUFFIX, is_quantized_when_published, scale_shape
from moerl.types.push import TensorSpec
from moerl.weights.plan.transfer_plan import PlannedTensor

FP8_DTYPE = "float8_e4m3fn"


def with_scales(tensors: Iterable[PlannedTensor]) -> list[PlannedTensor]:
    """The same with what is FP8 in a published checkpoint in FP8, each followed by its scales: X.weight, X.weight_scale_inv.

    Every piece of the values travels with its own of the scales: those of the blocks that begin in it. However ranks and parts cut the
    values, these pieces of the scales are disjoint and make them up, and a rank that has the values has the scales.
    """
    found: list[PlannedTensor] = []
    for tensor in tensors:
        values, *scales = fp8_specs(tensor.spec)
        stage, expert, cut_dim = tensor.stage, tensor.expert, tensor.cut_dim  # replace() takes three times as long
        found.append(PlannedTensor(spec=values, stage=stage, expert=expert, cut_dim=cut_dim))
        found += [PlannedTensor(spec=each, stage=stage, expert=expert, cut_dim=cut_dim, scales_of=tensor.name) for each in scales]
    return found


def fp8_specs(spec: TensorSpec) -> list[TensorSpec]:
    """Specs of the FP8 tensor and its scales; only `spec` itself for a tensor that stays as it is."""
    if not is_quantized_when_published(spec.name, spec.shape):
        return [spec]
    scales = TensorSpec(name=spec.name + SCALE_SUFFIX, shape=scale_shape(spec.shape), dtype="float32")
    return [TensorSpec(name=spec.name, shape=spec.shape, dtype=FP8_DTYPE), scales]


def in_fp8(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    """Specs that a server that takes FP8 expects, by name. `specs`: of the checkpoint in the rollout's dtype."""
    return {found.name: found for spec in specs for found in fp8_specs(spec)}


def is_ragged(shape: Sequence[int], dim: int | None, num_shards: int) -> bool:
    """Whether blocks lie across the edges of equal shards along `dim`."""
    return dim is not None and num_shards > 1 and shape[dim] // num_shards % BLOCK != 0
