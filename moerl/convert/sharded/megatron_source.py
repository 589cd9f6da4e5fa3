"""Checkpoints that others train, as a source: Megatron's format torch_dist, written by Megatron-LM (slime), Megatron-Bridge or verl.

    RUN/latest_checkpointed_iteration.txt    Megatron-LM, slime, Megatron-Bridge: a number, or "release"
    RUN/iter_0000100, RUN/release            .metadata, metadata.json, common.pt and shards
    global_step_100/actor/model/dist_ckpt    verl 0.9, with model/huggingface: config.json and tokenizer
    global_step_100/actor/dist_ckpt          verl before, with huggingface/ beside it

Only the index and the shards are read, and only weights: not common.pt, which holds Python objects of the trainer, nor the state of
optimizers. Keys are those of Megatron's own sharded_state_dict, stacked over layers or not; nobody here adds a prefix to them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moerl.convert.hf.hf_source import states_of
from moerl.convert.sharded.sharded_source import ShardedSource, is_sharded
from moerl.train.checkpoint.checkpoint_dirs import INDEX, digest_of
from moerl.train.checkpoint.checkpoint_pickles import read_index
from moerl.types.errors import CheckpointError, ConvertError, can_be, problem
from moerl.types.json_text import read_object

_TRACKER = "latest_checkpointed_iteration.txt"
_OF_VERL = ("model/dist_ckpt", "dist_ckpt")


def megatron_folder(directory: Path) -> Path | None:
    """The folder with the index of shards: `directory`, its newest iteration, or in it verl's folder of the model; None: neither."""
    if not can_be(directory) or is_sharded(directory):
        return None
    places = [directory, *(directory / part for part in _OF_VERL)]
    if (newest := _newest(directory / _TRACKER)) is not None:
        places.insert(0, directory / newest)
    return next((place for place in places if (place / INDEX).is_file()), None)


def model_folder(folder: Path, files_from: Path | None) -> Path | None:
    """The Hugging Face folder with config.json, and with what belongs to a model beside its weights: `files_from`, or verl's."""
    beside = folder.parent / "huggingface"
    return files_from if files_from is not None or not (beside / "config.json").is_file() else beside


def open_megatron(folder: Path, files_from: Path | None) -> ShardedSource:
    """Raises ConvertError with what keeps the folder from being read."""
    problems, index, config = [], None, {}
    try:
        index = read_index(folder)
        if (backend := read_object(folder / "metadata.json").get("sharded_backend")) != "torch_dist":
            raise ValueError(f"metadata.json says that its format is {backend!r}, not 'torch_dist'")
    except (CheckpointError, OSError, ValueError) as error:
        fix = "a checkpoint saved with ckpt_format=torch_dist"
        problems.append(problem("SRC", str(folder), "must be a whole checkpoint of Megatron", str(error), fix))
    model = model_folder(folder, files_from)
    try:
        if model is None:
            raise ValueError("Megatron's checkpoints have no config.json, which says what their tensors are")
        config = read_object(model / "config.json")
    except (OSError, ValueError) as error:
        fix = "the Hugging Face folder of the model that was trained"
        problems.append(problem("--files-from", None if model is None else str(model), "must hold config.json", str(error), fix))
    if problems or index is None:
        raise ConvertError(problems)
    return ShardedSource(directory=folder, config=config, metadata=index)


def tensors_of_index(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Every tensor, those of optimizers too. Raises ConvertError."""
    try:
        index = read_index(folder)
    except CheckpointError as error:
        fix = "a checkpoint saved with ckpt_format=torch_dist"
        raise ConvertError([problem("PATH", str(folder), "must be a whole checkpoint of Megatron", str(error), fix)]) from error
    return ShardedSource(directory=folder, config={}, metadata=index).tensors()


def identity_of(folder: Path) -> Mapping[str, Any]:
    """Changes when the checkpoint does, as far as its index and the sizes and times of its shards show."""
    return {INDEX: digest_of(folder / INDEX), **states_of(sorted(folder.glob("*.distcp")))}


def _newest(tracker: Path) -> str | None:
    """Name of the folder that the tracker names; None without one that Megatron would read."""
    try:
        text = tracker.read_text().strip()
    except (OSError, ValueError):
        return None
    return "release" if text == "release" else f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 10 else None
