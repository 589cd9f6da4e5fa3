"""Carry weights with Megatron-Bridge (github.com/NVIDIA-NeMo/Megatron-Bridge): its name maps, its scattering and gathering.

Everything else is as with the native bridge: the model is Megatron's by the family's declaration, not by Megatron-Bridge's provider.
Its mappings know no padded vocabulary: what they read is padded before, and what they export is cut to the vocabulary.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from moerl.models.bridge.adapter_bridge import AdapterBridge
from moerl.models.bridge.bridge_family import model_bridge
from moerl.models.hf_checkpoint import HFCheckpoint

_OVER_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


class MegatronBridge(AdapterBridge):
    def _open(self) -> list[str]:
        config = SimpleNamespace(**json.loads((self._source / "config.json").read_text()))
        computed_as = self._family.served.computed_as
        self._bridge = model_bridge(config.model_type if computed_as is None else computed_as, config)
        with HFCheckpoint(self._source) as checkpoint:
            self._pretrained = _Source(state=_State(checkpoint.names()), config=config)
        self._tasks = self._bridge.build_conversion_tasks(self._pretrained, self._chunks)
        return [name for task in self._tasks for name in self._hf_names(task.mapping)]

    def load(self, checkpoint: HFCheckpoint) -> None:
        """A collective: every rank reads, tensor-parallel rank 0 scatters."""
        self._check(checkpoint)
        state = _State(checkpoint.names(), read=lambda name: self._read(checkpoint, name))
        source = _Source(state=state, config=self._pretrained.config)
        # Not those of export: a mapping that has loaded on its owner would leave out a part of its first exchange with other stages.
        tasks = self._bridge.build_conversion_tasks(source, self._chunks)
        parameters = {(task.vp_stage, task.param_name): task.param_weight for task in tasks}
        with torch.no_grad():
            for name, shard, stage in self._bridge.stream_weights_hf_to_megatron(source, self._chunks, tasks):
                parameters[stage, name].copy_(shard)
            if self._tied:
                self._share_embedding()

    def _whole(self) -> Iterable[tuple[str, Tensor]]:
        whole = self._bridge.stream_weights_megatron_to_hf(
            self._chunks, self._pretrained, cpu=False, show_progress=False, conversion_tasks=self._tasks, merge_adapter_weights=False
        )
        return ((name, tensor[: self._sizes.vocab_size] if name in _OVER_VOCABULARY else tensor) for name, tensor in whole)

    def _read(self, checkpoint: HFCheckpoint, name: str) -> Tensor:
        """In the parameter's dtype, which scattering needs, with as many rows as Megatron pads the vocabulary to."""
        tensor = checkpoint.read(name).to(self.dtype(name, self._dtype))
        if name not in _OVER_VOCABULARY:
            return tensor
        return torch.nn.functional.pad(tensor, (0, 0, 0, self._sizes.padded_vocab_size - self._sizes.vocab_size))

    def _share_embedding(self) -> None:
        """With the last stage's output layer, which no mapping fills; Megatron-Bridge's own way knows no virtual stages."""
        shared: list[Any] = [chunk for chunk in self._chunks if chunk.pre_process or chunk.post_process]
        if shared and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            group = parallel_state.get_embedding_group()
            dist.broadcast(shared[0].shared_embedding_or_output_weight(), dist.get_process_group_ranks(group)[0], group=group)

    def _hf_names(self, mapping: Any) -> list[str]:
        """Names of an expert on every expert-parallel rank."""
        names = [mapping.hf_param] if isinstance(mapping.hf_param, str) else list(mapping.hf_param.values())
        if not mapping.is_expert:
            return names
        ranks = parallel_state.get_expert_model_parallel_world_size()
        num_local = self._chunks[0].config.num_moe_experts // ranks  # type: ignore[union-attr]
        return [_of_rank(name, rank, num_local) for name in names for rank in range(ranks)]


class _State(Mapping[str, Tensor]):
    """The tensors of a checkpoint as Megatron-Bridge asks for them; `source` is asked for all names."""

    def __init__(self, names: Sequence[str], *, read: Callable[[str], Tensor] | None = None):
        self._names, self._read, self.source = dict.fromkeys(names), read, self

    def get_all_keys(self) -> list[str]:
        return list(self._names)

    def __getitem__(self, name: str) -> Tensor:
        assert self._read is not None, "only names are known when weights are not being loaded"
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Object that Megatron-Bridge takes for a pretrained model of transformers."""

    state: _State
    config: SimpleNamespace
    """config.json, unchanged: transformers 5 would rename what the mappings read."""


def _of_rank(name: str, rank: int, num_local: int) -> str:
    """Name of the expert that has on expert-parallel `rank` the place that the expert of `name` has on its own."""
    return re.sub(r"experts\.(\d+)", lambda match: f"experts.{int(match[1]) % num_local + rank * num_local}", name)
