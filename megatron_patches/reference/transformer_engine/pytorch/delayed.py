"""Delayed scaling: scales of earlier passes, the largest magnitudes of this one, and the update between them.

Layout and arithmetic of Transformer Engine (common/recipe/delayed_scaling.cu): column i of a history belongs to scale i; row 0 collects
the pass in progress. Forward scales: inputs, weights, outputs of every GEMM; backward: gradients of outputs, of inputs.
"""

import pickle
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantize import Quantizer

Kind = Literal["input", "weight", "grad"]


class DelayedScales:
    """Of one module with `num_gemms` weights."""

    def __init__(self, recipe: DelayedScaling, num_gemms: int, device: Any):
        self.recipe, self.num_gemms = recipe, num_gemms
        self.scale_fwd, self.scale_bwd = (torch.ones(n * num_gemms, device=device) for n in (3, 2))
        length = recipe.amax_history_len
        self.amax_history_fwd, self.amax_history_bwd = (torch.zeros(length, n * num_gemms, device=device) for n in (3, 2))

    def quantizer(self, kind: Kind, gemm: int, dtype: torch.dtype) -> Quantizer:
        """Uses the scale that is current when an operand is cast, and notes the magnitude that the next one must hold."""
        place = gemm + (self.num_gemms if kind == "weight" else 0)
        scales, history = (self.scale_bwd, self.amax_history_bwd) if kind == "grad" else (self.scale_fwd, self.amax_history_fwd)

        def scale_of(amax: Tensor, largest: float, source_max: float) -> tuple[Tensor, Tensor]:
            history[0, place] = torch.maximum(history[0, place], amax.max())
            scale = scales[place].clone().reshape(1, 1)
            return scale, scale.reciprocal()

        return Quantizer(dtype, None, scale_of)

    def to_bytes(self) -> Tensor:
        """uint8, Transformer Engine's extra state of a module: what Megatron's grouped layers take apart by expert."""
        state = {name: getattr(self, name).cpu() for name in _TENSORS}
        pickled = pickle.dumps({"recipe": self.recipe, "extra_fp8_variables": {"num_gemms": self.num_gemms}, **state})
        return torch.frombuffer(bytearray(pickled), dtype=torch.uint8)

    def load_bytes(self, state: Tensor) -> None:
        values = pickle.loads(state.cpu().numpy().tobytes())
        for name in _TENSORS:
            target = getattr(self, name)
            target.copy_(values[name].reshape(target.shape))


_TENSORS = ("scale_fwd", "scale_bwd", "amax_history_fwd", "amax_history_bwd")


def update(registered: Iterable[tuple[DelayedScales, Any]], *, forward: bool) -> None:
    """New scales of every module from this pass's magnitudes, the largest over the ranks of their group, and earlier ones'."""
    by_group: dict[Any, list[DelayedScales]] = {}
    for scales, group in registered:
        by_group.setdefault(group, []).append(scales)
    for group, members in by_group.items():
        histories = [m.amax_history_fwd if forward else m.amax_history_bwd for m in members]
        latest = torch.cat([history[0] for history in histories])
        if members[0].recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=group)
        for scales, history, amax in zip(members, histories, latest.split([h.shape[1] for h in histories]), strict=True):
            history[0] = amax
            _roll(scales.recipe, history, scales.scale_fwd if forward else scales.scale_bwd, forward)


def _roll(recipe: DelayedScaling, history: Tensor, scale: Tensor, forward: bool) -> None:
    amax = history[0].clone() if recipe.amax_compute_algo == "most_recent" else history.amax(0)
    history.copy_(history.roll(-1, 0))
    history[0] = 0
    largest = recipe.fp8_format.value.max_fwd if forward else recipe.fp8_format.value.max_bwd
    usable = (amax > 0) & amax.isfinite()
    scale.copy_(torch.where(usable, torch.full_like(amax, largest * 2.0**-recipe.margin) / amax, scale))
