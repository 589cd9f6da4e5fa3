"""Two checkpoints tensor by tensor: folders, FP8 by what its values mean, and checkpoints of runs by their Hugging Face names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moerl.convert.hf import hf_plan
from moerl.convert.hf.hf_source import HFSource
from moerl.convert.sharded.megatron_source import megatron_folder
from moerl.convert.sharded.sharded_source import ShardedSource, is_sharded
from moerl.convert.sharded.sharded_to_hf import entries_of
from moerl.convert.tensors.entry import PIECE_BYTES, Entry, read_whole
from moerl.types.errors import ConvertError, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    differences: Mapping[str, str]
    """Name of a tensor -> what differs."""
    num_equal: int
    largest: float
    """Largest absolute difference of all, those within the tolerance too."""

    @property
    def is_equal(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        lines = [f"{name}: {what}" for name, what in self.differences.items()]
        total = f"{self.num_equal} tensors are equal, {len(self.differences)} differ; the largest difference is {self.largest:g}"
        return "\n".join([*lines, total])


def compared(left: Path, right: Path, *, tolerance: float) -> Comparison:
    """Values as they are, whatever the dtype. Raises ConvertError with the faults of both."""
    sides, problems = [], []
    for path in (left, right):
        try:
            sides.append({entry.name: entry for entry in _entries(path)})
        except ConvertError as error:
            problems += error.problems
    if problems:
        raise ConvertError(problems)
    a, b = sides
    found = {name: _difference(a.get(name), b.get(name), tolerance) for name in (*a, *(name for name in b if name not in a))}
    differences = {name: what for name, (what, _) in found.items() if what is not None}
    largest = max((distance for _, distance in found.values()), default=0.0)
    return Comparison(differences=differences, num_equal=len(found) - len(differences), largest=largest)


def _entries(path: Path) -> list[Entry]:
    if megatron_folder(path) is not None:
        reason = "what others trained has no config.json, which says what its tensors are"
        fix = f"moerl convert {path} FOLDER --files-from MODEL first, then FOLDER"
        raise ConvertError([problem("PATH", str(path), "must be a Hugging Face folder or a run's checkpoint", reason, fix)])
    if is_sharded(path):
        return entries_of(ShardedSource.open(path), None, None, without_untrained=True)
    source = HFSource.open(path)
    if problems := list(hf_plan.fp8_problems(source)):
        raise ConvertError(problems)
    return [hf_plan.without_fp8(source, name, torch.float32) for name in source.tensors if not hf_plan.is_scale(source, name)]


def _difference(a: Entry | None, b: Entry | None, tolerance: float) -> tuple[str | None, float]:
    """(what differs or None, the largest absolute difference)."""
    if a is None or b is None:
        return f"is only in {'B' if a is None else 'A'}", 0.0
    if a.shape != b.shape:
        return f"shape {a.shape} in A, {b.shape} in B", 0.0
    largest = max(_distances(read_whole(a), read_whole(b)), default=0.0)
    if largest <= tolerance:
        return None, largest
    dtypes = "" if a.dtype == b.dtype else f" ({a.dtype} in A, {b.dtype} in B)"
    return f"largest difference {largest:g}{dtypes}", largest


def _distances(a: Tensor, b: Tensor) -> Iterator[float]:
    """Distances of parts; NaN beside NaN and equal infinities are equal, NaN beside a number is infinitely far from it. Different integers
    are at least 1 apart, also those that float64 rounds to one number."""
    if a.numel() == 0:
        return
    are_integers = not (a.is_floating_point() or b.is_floating_point())
    for left, right in zip(a.reshape(-1).split(PIECE_BYTES), b.reshape(-1).split(PIECE_BYTES), strict=True):
        x, y = left.double(), right.double()
        # As int64, since torch compares unsigned ones of two dtypes not at all; what wraps around is far apart as float64.
        same = (left.long() == right.long()) & (x == y) if are_integers else (x == y) | (x.isnan() & y.isnan())
        apart = (x - y).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).clamp(min=1.0 if are_integers else 0.0)
        yield float(torch.where(same, 0.0, apart).max())
