"""Carry weights with mbridge (github.com/ISEEKYAN/mbridge): its name maps, its gathering; everything else as the native bridge.

The model itself is Megatron's by the family's declaration. mbridge's own configuration of it is dropped: it leaves out, for one,
the group limit of DeepSeek's router (n_group, topk_group).
"""

import importlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

import megatron_patches
from moerl.models.bridge.adapter_bridge import AdapterBridge
from moerl.models.hf_checkpoint import HFCheckpoint


class MBridge(AdapterBridge):
    def load(self, checkpoint: HFCheckpoint) -> None:
        """A collective: tensor-parallel rank 0 reads and scatters."""
        self._check(checkpoint)
        with torch.no_grad():
            self._bridge.load_weights(self._chunks, str(self._source), memory_efficient=True)

    def _whole(self) -> Iterable[tuple[str, Tensor]]:
        return self._bridge.export_weights(self._chunks)

    def _open(self) -> list[str]:
        """In mbridge's order: stage after stage, parameters before buffers, and the same expert of every expert-parallel rank at once."""
        self._bridge = self._build()
        mine = []
        for chunk in self._chunks:
            names = self._bridge._weight_name_mapping_mcore_local_to_global(chunk, consider_ep=False)
            parameters = [name for name, _ in chunk.named_parameters()]
            mine += [names[name] for name in parameters] + [names[name] for name in names if name.endswith("expert_bias")]
        held: list[list[str]] = [[] for _ in range(parallel_state.get_pipeline_model_parallel_world_size())]
        dist.all_gather_object(held, mine, group=parallel_state.get_pipeline_model_parallel_group())
        # Without duplicates: the output layer of a tied model has the embedding's name.
        return list(dict.fromkeys(hf for stage in held for name in stage for hf in self._hf_names(name)))

    def _build(self) -> Any:
        mbridge = importlib.import_module("mbridge")
        megatron_patches.activate()  # again: those of mbridge are needed only now
        bridge = mbridge.AutoBridge.from_pretrained(str(self._source), dtype=self._dtype)
        bridge.config = self._chunks[0].config
        if getattr(bridge.hf_config, "head_dim", None) is None:  # transformers 5 has the field without a value, where 4 had no field
            bridge.hf_config.head_dim = self._sizes.head_dim
        # Its own model provider would set these.
        bridge.make_vocab_size_divisible_by = bridge.mpu.tp_size
        bridge.vocab_size, bridge.padded_vocab_size = self._sizes.vocab_size, self._sizes.padded_vocab_size
        # Not what the class has: a tied Qwen model changes it for every later model of the process.
        output = "model.embed_tokens.weight" if self._tied else "lm_head.weight"
        bridge._DIRECT_MAPPING = bridge._DIRECT_MAPPING | {"output_layer.weight": output}
        return bridge

    def _hf_names(self, name: str) -> list[str]:
        names = [name]
        if ".mlp.experts.linear_fc" in name:
            stem, number = name.split(".weight")
            ranks = parallel_state.get_expert_model_parallel_world_size()
            num_local = self._chunks[0].config.num_moe_experts // ranks  # type: ignore[union-attr]
            names = [f"{stem}.weight{int(number) + rank * num_local}" for rank in range(ranks)]
        return [hf for each in names for hf in self._bridge._weight_name_mapping_mcore_to_hf(each)]
