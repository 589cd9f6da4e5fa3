"""Tensors that one training rank has for a push: pieces of what it holds, by their Hugging Face names.

The native bridge says what every rank holds, so each sends its own. The packages of train.bridge gather whole tensors on rank 0, which
then holds all of them, in host memory or on the GPU as the package exports them, until it has sent them. FP8 is made here, by the rank
that sends.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.config.schema.layout import Layout
from moerl.models.bridge.rank_tensors import RankTensors
from moerl.models.bridge.weight_bridge import WeightBridge
from moerl.models.fp8_blocks import ScaleFormat, quantized_box
from moerl.models.fp8_names import SCALE_SUFFIX
from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.train.push.block_scales import BlockScales
from moerl.types.push import TensorSpec
from moerl.weights.plan.fp8_pairs import fp8_specs, is_ragged, with_scales
from moerl.weights.plan.run_plan import Outline
from moerl.weights.plan.spec_tensors import box_of
from moerl.weights.plan.tensor_specs import expert_of
from moerl.weights.plan.transfer_plan import PlannedTensor


class PushedTensors:
    def __init__(
        self, bridge: WeightBridge, layout: Layout, dtype: torch.dtype, source: Path, *, fp8_scales: ScaleFormat | None,
        with_mtp: bool = False,
    ):  # fmt: skip
        """`dtype`: in which they leave. `source`: the checkpoint the model was loaded from. `fp8_scales`: those that published checkpoints
        quantize leave in blocks of FP8 made of `dtype`, and scales of this form with them. None: they do not. `with_mtp`: trained layers
        of multi-token prediction leave too, which needs the native bridge."""
        self._bridge, self._owned = bridge, bridge.owned()
        self._layout, self._dtype, self._source, self._with_mtp = layout, dtype, source, with_mtp
        self._gathered: dict[str, Tensor] | None = None
        self._format: ScaleFormat = "float32" if fp8_scales is None else fp8_scales
        quantized = () if fp8_scales is None else (tensor for tensor in self._planned() if len(fp8_specs(tensor.spec)) > 1)
        self._quantized = {tensor.name: tensor for tensor in quantized}
        self._scales = self._no_scales()

    def outline(self, bucket_bytes: int) -> Outline:
        """The same on every rank."""
        planned = with_scales(self._planned()) if self._quantized else self._planned()
        layout = Layout() if self._owned is None else self._layout
        return Outline(tensors=planned, layout=layout, bucket_bytes=bucket_bytes)

    def specs(self) -> list[TensorSpec]:
        """Specs of every tensor, stacks whole; shapes from the checkpoint."""
        with HFCheckpoint(self._source) as checkpoint:
            names = self._bridge.names(with_mtp=False)
            return [_spec(name, checkpoint.shape(name), self._bridge.dtype(name, self._dtype)) for name in names]

    def gather(self) -> None:
        """Collective, of the weights as they are now. Nothing to do with the native bridge if no block of FP8 lies on two ranks."""
        self._scales = self._no_scales()
        if self._owned is None:
            self._gathered = None  # of a push that failed: not two models at a time
            # Copies: an export may give the parameter itself.
            self._gathered = {name: tensor.clone() for name, tensor in self._bridge.export(self._dtype, with_mtp=False)}
            return
        self._scales.exchange(self._shared_blocks(self._owned))

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A piece in the dtype in which it leaves; possibly a view of a parameter."""
        if name in self._quantized:
            return quantized_box(self._unquantized(name, start, shape), start, self._scales.of(name))
        if (values := name.removesuffix(SCALE_SUFFIX)) != name and values in self._quantized:
            return box_of(self._scales.of(values), start, shape)
        return self._unquantized(name, start, shape)

    def release(self) -> None:
        """End of what was made for the push."""
        self._gathered, self._scales = None, self._no_scales()

    def _planned(self) -> list[PlannedTensor]:
        """All in self._dtype."""
        if self._owned is None:
            return [PlannedTensor(spec=spec, stage=0, expert=expert_of(spec.name), cut_dim=None) for spec in self.specs()]
        per_stage = self._layout.ranks // self._layout.pp
        return [
            PlannedTensor(
                spec=_spec(part.name, part.shape, part.dtype), stage=part.owner // per_stage, expert=part.expert, cut_dim=part.cut_dim
            )
            for part in self._owned.parts(self._dtype, with_mtp=self._with_mtp)
        ]

    def _unquantized(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        if self._owned is None:
            return box_of(self._whole(name), start, shape)
        return self._owned.piece(name, start, shape, self._dtype)

    def _no_scales(self) -> BlockScales:
        return BlockScales(self._held, {name: tensor.spec.shape for name, tensor in self._quantized.items()}, self._format)

    def _held(self, name: str) -> tuple[Tensor, tuple[int, ...]]:
        if self._owned is None:
            return self._whole(name), (0, 0)
        shard = self._owned.shard(name)
        assert shard is not None, f"the plan wants {name} of a rank that holds nothing of it"
        return shard.tensor.to(self._dtype), shard.start

    def _whole(self, name: str) -> Tensor:
        assert self._gathered is not None, "gather comes first"
        return self._gathered[name]

    def _shared_blocks(self, owned: RankTensors) -> dict[str, dist.ProcessGroup]:
        """Tensors of this rank with blocks that lie on several ranks of a group, in one order on all of them."""
        shards = ((tensor, owned.shard(name)) for name, tensor in sorted(self._quantized.items()))
        return {
            tensor.name: shard.group
            for tensor, shard in shards
            if shard is not None and is_ragged(tensor.spec.shape, tensor.cut_dim, shard.group.size())
        }


def _spec(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=str(dtype).removeprefix("torch."))
