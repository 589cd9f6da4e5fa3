"""Carry weights with mbridge (github.com/ISEEKYAN/mbridge): its name maps, its gathering; everything else as the native bridge.

The model itself is Megatron's by the family's declaration. mbridge's own configuration of it is dropped: it leaves out, for one,
the group limit of DeepSeek's router (n_group, topk_group).
"""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

import megatron_patches
from moerl.models.bridge import check_shape, mtp_layers
from moerl.models.checkpoint import HFCheckpoint
from moerl.models.family import Sizes
from moerl.types import CheckpointError

_EXPERT_BIAS = ".e_score_correction_bias"


class MBridge:
    def __init__(self, chunks: Sequence[nn.Module], *, sizes: Sizes, tied: bool, source: Path, dtype: torch.dtype):
        """A collective. `chunks`: this rank's GPTModels without layers of multi-token prediction. `dtype`: the model's.

        `source`: the checkpoint the model comes from. `tied`: the output layer is the embedding, so that it is not exported twice.
        """
        self._chunks, self._tied, self._source = list(chunks), tied, source
        self._bridge = self._build(sizes, dtype)
        self._names = self._find_names()
        layers = mtp_layers(source, sizes.num_layers)
        self._kept = sorted({name for names in layers.values() for name in names} - set(self._names))

    def tensors(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            state = chunk.state_dict().keys()
            yield from chunk.parameters()
            yield from (buffer for name, buffer in chunk.named_buffers() if name in state)

    def load(self, checkpoint: HFCheckpoint) -> None:
        """A collective: tensor-parallel rank 0 reads and scatters."""
        absent = sorted(set(self._names) - set(checkpoint.names()))
        if absent:
            raise CheckpointError(
                f"{self._source}: no file of this checkpoint holds {', '.join(absent)}; is it complete, and of this model?"
            )
        for chunk in self._chunks:
            self._check_shapes(chunk, checkpoint)
        with torch.no_grad():
            self._bridge.load_weights(self._chunks, str(self._source), memory_efficient=True)

    def names(self, *, with_mtp: bool = True) -> list[str]:
        return self._names + (self._kept if with_mtp else [])

    def dtype(self, name: str, model_dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if name.endswith(_EXPERT_BIAS) else model_dtype

    def export(self, dtype: torch.dtype, *, with_mtp: bool = True) -> Iterator[tuple[str, Tensor]]:
        """mbridge gathers on every rank, not on rank 0 alone. Layers of multi-token prediction keep the checkpoint's dtype."""
        remaining = dict.fromkeys(self._names)
        for name, tensor in self._bridge.export_weights(self._chunks):
            if name in remaining and dist.get_rank() == 0:
                del remaining[name]  # the output layer of a tied model comes as a second embedding
                yield name, tensor.detach().to(self.dtype(name, dtype))
        if with_mtp and self._kept and dist.get_rank() == 0:
            with HFCheckpoint(self._source) as checkpoint:
                yield from ((name, checkpoint.read(name)) for name in self._kept)

    def originals(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
        """None: mbridge gathers every tensor on every rank, and tells no owner."""
        yield from ()

    def _build(self, sizes: Sizes, dtype: torch.dtype) -> Any:
        mbridge = importlib.import_module("mbridge")
        megatron_patches.activate()  # again: those of mbridge are needed only now
        bridge = mbridge.AutoBridge.from_pretrained(str(self._source), dtype=dtype)
        bridge.config = self._chunks[0].config
        if getattr(bridge.hf_config, "head_dim", None) is None:  # transformers 5 has the field without a value, where 4 had no field
            bridge.hf_config.head_dim = sizes.head_dim
        # Its own model provider would set these.
        bridge.make_vocab_size_divisible_by = bridge.mpu.tp_size
        bridge.vocab_size, bridge.padded_vocab_size = sizes.vocab_size, sizes.padded_vocab_size
        # Not what the class has: a tied Qwen model changes it for every later model of the process.
        output = "model.embed_tokens.weight" if self._tied else "lm_head.weight"
        bridge._DIRECT_MAPPING = bridge._DIRECT_MAPPING | {"output_layer.weight": output}
        return bridge

    def _find_names(self) -> list[str]:
        """In mbridge's order: stage after stage, parameters before buffers, and the same expert of every expert-parallel rank at once."""
        mine = []
        for chunk in self._chunks:
            names = self._bridge._weight_name_mapping_mcore_local_to_global(chunk, consider_ep=False)
            parameters = [name for name, _ in chunk.named_parameters()]
            mine += [names[name] for name in parameters] + [names[name] for name in names if name.endswith("expert_bias")]
        held: list[list[str]] = [[] for _ in range(parallel_state.get_pipeline_model_parallel_world_size())]
        dist.all_gather_object(held, mine, group=parallel_state.get_pipeline_model_parallel_group())
        # Without duplicates: the output layer of a tied model has the embedding's name.
        return list(dict.fromkeys(hf for stage in held for name in stage for hf in self._hf_names(name)))

    def _check_shapes(self, chunk: nn.Module, checkpoint: HFCheckpoint) -> None:
        """Of what this rank will hold, by mbridge's own export of tensors without memory: its import reports no names."""
        state = chunk.state_dict(keep_vars=True)
        for local, name in self._bridge._weight_name_mapping_mcore_local_to_global(chunk).items():
            shard = torch.empty_like(state[local], device="meta")
            is_expert, mpu = ".mlp.experts.linear_fc" in name, self._bridge.mpu
            is_split = is_expert or getattr(state[local], "tensor_model_parallel", False)
            shards = [shard] * ((mpu.etp_size if is_expert else mpu.tp_size) if is_split else 1)
            whole = self._bridge._weight_merge_across_tp(name, shards, state[local]) if len(shards) > 1 else shard
            for hf, expected in zip(*self._bridge._weight_to_hf_format(name, whole), strict=True):
                check_shape(hf, torch.empty(checkpoint.shape(hf), device="meta"), expected)

    def _hf_names(self, name: str) -> list[str]:
        names = [name]
        if ".mlp.experts.linear_fc" in name:
            stem, number = name.split(".weight")
            ranks = parallel_state.get_expert_model_parallel_world_size()
            num_local = self._chunks[0].config.num_moe_experts // ranks  # type: ignore[union-attr]
            names = [f"{stem}.weight{int(number) + rank * num_local}" for rank in range(ranks)]
        return [hf for each in names for hf in self._bridge._weight_name_mapping_mcore_to_hf(each)]
