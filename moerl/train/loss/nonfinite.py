"""Find where a loss or gradient stopped being a number: the rank, the micro-batch, the samples.

Runs only after it happened, before any weight has changed: the mini-batch is computed again in pieces, without the reduction over
data-parallel ranks that spreads one rank's NaN to all. First micro-batch by micro-batch, then the sequences of those at fault alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from moerl.train.batching.packed_sequences import PackedMicroBatch

_NAMED = 8
"""Findings and samples in a message; the rest are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    rank: int
    data_rank: int
    micro_batch: int
    samples: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        samples = ", ".join(map(str, self.samples[:_NAMED])) + (" and others" if len(self.samples) > _NAMED else "")
        return f"rank {self.rank}, micro-batch {self.micro_batch}, samples {samples}: {self.what}"


Run = Callable[[Sequence[PackedMicroBatch]], list[dict[str, Any]]]
"""Forward and backward of some micro-batches, gradients added up and not reduced; outputs on the last stage."""


def locate(
    run: Run,
    packed: Sequence[PackedMicroBatch],
    repack: Callable[[Sequence[int]], PackedMicroBatch],
    chunks: Sequence[nn.Module],
    piece: int,
) -> str:
    """Collective: where the trouble is, in words, the same on every rank. `piece`: fewest micro-batches the schedule runs."""
    found = _gather(_inspect(run, packed, chunks, piece))
    if not found:
        return "every micro-batch alone is finite: their sum overflows, or the sum of squares in the gradient norm"
    suspects = {rank: sorted({s for f in found if f.data_rank == rank for s in f.samples}) for rank in {f.data_rank for f in found}}
    # One sequence per piece; every rank runs as many pieces, so that the collectives inside the model match.
    alone = [repack([s]) for s in suspects.get(parallel_state.get_data_parallel_rank(), [])]
    padded = [micro for one in alone for micro in (one, *[repack([])] * (piece - 1))]
    padded += [repack([])] * (piece * max(map(len, suspects.values())) - len(padded))
    origin = {(f.data_rank, s): f.micro_batch for f in found for s in f.samples}
    precise = [replace(f, micro_batch=origin[f.data_rank, f.samples[0]]) for f in _gather(_inspect(run, padded, chunks, piece))]
    return _words(precise if precise else found)


def _inspect(run: Run, packed: Sequence[PackedMicroBatch], chunks: Sequence[nn.Module], piece: int) -> list[NonFinite]:
    """This rank's findings, piece by piece."""
    findings = []
    for first in range(0, len(packed), piece):
        part = packed[first : first + piece]
        for chunk in chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        outputs = run(part)
        what = _what(outputs, chunks)
        samples = tuple(sorted({sample for micro in part for sample in micro.members}))
        if what is not None and samples:
            findings.append(
                NonFinite(
                    rank=dist.get_rank(), data_rank=parallel_state.get_data_parallel_rank(), micro_batch=first, samples=samples, what=what
                )
            )
    return findings


def _what(outputs: list[dict[str, Any]], chunks: Sequence[nn.Module]) -> str | None:
    if any(not math.isfinite(out["sums"].loss) for out in outputs):
        return "loss is not finite"
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad and not torch.isfinite(parameter.main_grad).all():  # type: ignore[attr-defined]
                return f"gradient of {name.removeprefix('module.')} is not finite"
    return None


def _gather(findings: list[NonFinite]) -> list[NonFinite]:
    gathered: list[list[NonFinite]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, findings)
    return [finding for of_rank in gathered for finding in of_rank]


def _words(findings: list[NonFinite]) -> str:
    more = f"; and {len(findings) - _NAMED} more" if len(findings) > _NAMED else ""
    return "; ".join(map(str, findings[:_NAMED])) + more
