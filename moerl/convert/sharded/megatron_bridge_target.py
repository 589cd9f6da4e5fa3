"""A checkpoint that Megatron-Bridge 0.3.1 reads, in the form of its AutoBridge.import_ckpt: weights, and how its model is built.

    DST/latest_train_state.pt, latest_checkpointed_iteration.txt    that iteration 0 is the newest
    DST/iter_0000000/                                               shards, .metadata, metadata.json, common.pt, train_state.pt
    DST/iter_0000000/run_config.yaml                                a class of Megatron-Bridge and its arguments

A key per layer, which common.pt says, so that readers ask for those keys. Layers of multi-token prediction are written, but its model of
DeepSeek has none and leaves them unread.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from moerl.convert.sharded.parameters import family_of, num_experts
from moerl.convert.sharded.sharded_source import FORMAT, ShardPart, write_index
from moerl.convert.tensors.writing import FileJob, Finished
from moerl.models.bridge_packages import BRIDGES
from moerl.models.families.parts.config_fields import is_tied
from moerl.types.errors import Problem, problem

_ITERATION, _EXTRA = "iter_0000000", "extra_state.distcp"
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "non_homogeneous_layers": True}
_MODELS = "megatron.bridge.models"
_COUNTERS = ("step", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
_PARTS = ("train", "valid", "test")


def bridge_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Architecture whose weights are not known to be those that Megatron-Bridge has."""
    families, kind = BRIDGES["megatron_bridge"].families, config.get("model_type")
    if kind not in families:
        reason = "of no other is it held by a test that Megatron-Bridge's weights are these"
        rule = f"must be one of {', '.join(families)} with --to megatron_bridge"
        yield problem("SRC/config.json: model_type", kind, rule, reason, "Megatron-Bridge's own AutoBridge.import_ckpt")


def in_iteration(jobs: Sequence[FileJob]) -> list[FileJob]:
    return [replace(job, name=f"{_ITERATION}/{job.name}") for job in jobs]


def complete_bridge_folder(
    directory: Path, parts: Sequence[ShardPart], finished: Sequence[Finished], config: Mapping[str, Any], dtype: str
) -> None:
    """The files that make shards a checkpoint of Megatron-Bridge."""
    shards, state = directory / _ITERATION, _train_state()
    write_index(shards, parts, finished, list(_write_extra_states(shards, parts, num_experts(family_of(config), config))))
    torch.save({"checkpoint_version": 3.0, "iteration": 0, "content_metadata": _CONTENT}, shards / "common.pt")
    (shards / "metadata.json").write_text(json.dumps(FORMAT))
    checkpoint = {"save_optim": False, "save_rng": False, "fully_parallel_save": True}
    (shards / "run_config.yaml").write_text(yaml.safe_dump({"model": _model(config, dtype), "checkpoint": checkpoint}))
    for file in (shards / "train_state.pt", directory / "latest_train_state.pt"):
        torch.save(state, file)
    (directory / "latest_checkpointed_iteration.txt").write_text("0")


def _write_extra_states(shards: Path, parts: Sequence[ShardPart], experts: int) -> Iterator[WriteResult]:
    """Entries of the index for what Transformer Engine keeps of FP8 beside weights: nothing. Readers ask for it by name, of each module
    that their version has it of, and may be offered more. All are the same few bytes."""
    held = io.BytesIO()
    torch.save([torch.empty(0, dtype=torch.uint8)], held)
    (shards / _EXTRA).write_bytes(held.getvalue())
    place = _StorageInfo(_EXTRA, 0, len(held.getvalue()))
    modules = dict.fromkeys(part.key.rpartition(".")[0] for part in parts)
    modules |= {module.replace(".linear_proj", ".core_attention"): None for module in list(modules)}
    for module in modules:
        count = experts if ".experts.experts." in module else 1
        for index in range(count):
            yield WriteResult(MetadataIndex(f"{module}._extra_state/shard_{index}_{count}"), place.length, place)


def _model(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The model in the words of Megatron-Bridge, which instantiates what is under _target_."""
    family = family_of(config)
    fields = family.transformer_config(config) | family.rotary(config)
    provider = "mla_provider.MLAModelProvider" if fields.get("multi_latent_attention") else "gpt_provider.GPTModelProvider"
    spec = "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec"
    torch_dtype = {"_target_": f"torch.{dtype}", "_call_": False}
    return {
        "_target_": f"{_MODELS}.{provider}",
        **fields,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "transformer_layer_spec": {"_target_": spec, "_partial_": True, "use_transformer_engine": True},
        "vocab_size": config["vocab_size"],
        "share_embeddings_and_output_weights": is_tied(config),
        "make_vocab_size_divisible_by": 1,
        "seq_length": config["max_position_embeddings"],
        "bf16": dtype == "bfloat16",
        "params_dtype": torch_dtype,
        "pipeline_dtype": torch_dtype,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }


def _train_state() -> dict[str, torch.Tensor]:
    counters = {name: torch.tensor(0, dtype=torch.int32) for name in _COUNTERS}
    return counters | {"floating_point_operations_so_far": torch.tensor(0.0)} | {f"do_{part}": torch.tensor(False) for part in _PARTS}
