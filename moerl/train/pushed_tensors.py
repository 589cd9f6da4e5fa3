"""What one training rank has for a push: pieces of what it holds, by their Hugging Face names.

The native bridge says what every rank holds, so each sends its own. The packages of train.bridge gather whole tensors on rank 0, which
then holds all of them in host memory, until it has sent them.
"""

from pathlib import Path

import torch
from torch import Tensor

from moerl.config.layout import Layout
from moerl.models.checkpoint import HFCheckpoint
from moerl.models.weight_bridge import WeightBridge
from moerl.push_types import TensorSpec
from moerl.weights.fleet_plan import Outline
from moerl.weights.plan import PlannedTensor
from moerl.weights.spec import box_of, expert_of


class PushedTensors:
    def __init__(self, bridge: WeightBridge, layout: Layout, dtype: torch.dtype, source: Path):
        """`dtype`: in which they leave. `source`: the checkpoint the model was loaded from."""
        self._bridge, self._layout, self._dtype, self._source = bridge, layout, dtype, source
        self._gathered: dict[str, Tensor] | None = None

    def outline(self, bucket_bytes: int) -> Outline:
        """The same on every rank."""
        parts = self._bridge.parts(self._dtype)
        if parts is None:
            whole = [PlannedTensor(spec=spec, stage=0, expert=expert_of(spec.name), cut_dim=None) for spec in self.specs()]
            return Outline(tensors=whole, layout=Layout(), bucket_bytes=bucket_bytes)
        per_stage = self._layout.ranks // self._layout.pp
        planned = [
            PlannedTensor(
                spec=_spec(part.name, part.shape, part.dtype), stage=part.owner // per_stage, expert=part.expert, cut_dim=part.cut_dim
            )
            for part in parts
        ]
        return Outline(tensors=planned, layout=self._layout, bucket_bytes=bucket_bytes)

    def specs(self) -> list[TensorSpec]:
        """Of every tensor, stacks whole; shapes from the checkpoint."""
        with HFCheckpoint(self._source) as checkpoint:
            names = self._bridge.names(with_mtp=False)
            return [_spec(name, checkpoint.shape(name), self._bridge.dtype(name, self._dtype)) for name in names]

    def gather(self) -> None:
        """Collective. Nothing with the native bridge."""
        if self._bridge.parts(self._dtype) is None:
            # Copies: an export may give the parameter itself.
            self._gathered = {name: tensor.clone() for name, tensor in self._bridge.export(self._dtype, with_mtp=False)}

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A piece in the dtype in which it leaves; possibly a view of a parameter."""
        if self._gathered is not None:
            return box_of(self._gathered[name], start, shape)
        return self._bridge.piece(name, start, shape, self._dtype)

    def release(self) -> None:
        """Of what was gathered."""
        self._gathered = None


def _spec(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=str(dtype).removeprefix("torch."))
