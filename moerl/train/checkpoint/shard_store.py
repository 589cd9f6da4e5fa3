"""Save and load the state of an engine: a checkpoint of any layout and dtype loads into any other, each rank reading what it needs."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch.distributed.checkpoint import metadata as dcp

from moerl.config.schema.train_config import TrainConfig
from moerl.train.checkpoint import sharded_state
from moerl.train.checkpoint.checkpoint_dirs import COMMON, HEAD, INDEX, FileDigests
from moerl.train.checkpoint.checkpoint_pickles import check_extra_state, index_of, load_object
from moerl.train.checkpoint.shard_reader import Found, read_shards
from moerl.train.checkpoint.shard_writer import ShardWriter
from moerl.train.checkpoint.stored_items import Contents, Need, contents_of, needs_of
from moerl.train.megatron.megatron_model import Model
from moerl.types.errors import CheckpointError

Wanted = Sequence[ShardedTensor | ShardedObject]

logger = logging.getLogger(__name__)


class ShardStore:
    def __init__(self, model: Model, optimizer: Any, train: TrainConfig):
        self._model, self._optimizer, self._train = model, optimizer, train
        self.writer = ShardWriter(parallel_state.get_data_parallel_group(with_context_parallel=True))
        """Writes what was staged, not collectively and on any thread."""

    def stage(self, *, copies: bool) -> int:
        """Collective: fix what `writer` will write. Returns the bytes of this rank's shards.

        `copies`: to host memory, so that training may go on while it writes; without, it may not.
        """
        model = sharded_state.model_state(self._model.chunks)
        if not sharded_state.has_stepped(self._optimizer):  # no update of the run so far was applied
            sharded_state.begin_optimizer_state(self._optimizer)
        optimizer = sharded_state.optimizer_state(self._optimizer, model)
        common = {"optimizer_steps": sharded_state.num_optimizer_steps(self._optimizer), "content_metadata": self._content()}
        return self.writer.stage({"model": model, "optimizer": optimizer.shards, "rng": self._rng()}, common, copies=copies)

    def load(self, directory: Path, files: FileDigests, *, weights_only: bool = False) -> list[str]:
        """Collective, in place, every file read once by all ranks together: no more memory than an item of a file at a time.

        `files`: sizes and digests that they should have. Returns the names of damaged ones, the same on all ranks; the engine is then of
        no use. Raises CheckpointError if something in them is not data (a checkpoint runs nothing) or not of this model."""
        try:
            head, damaged = _read_head(directory, files)
            index = dcp.Metadata({}, storage_data={}) if damaged else _index(head[INDEX], files)
            shards = {name: entry for name, entry in files.items() if name not in HEAD}
            read = partial(self._read, directory, contents_of(index, shards, dist.get_world_size()), shards)
            if damaged:  # nobody knows what lies where
                return damaged + read([]).damaged
            common = load_object(head[COMMON])
            if not isinstance(common, dict):
                raise CheckpointError(f"{COMMON} holds {type(common).__name__}, not settings")
            return self._load(common, read, weights_only=weights_only)
        except CheckpointError as error:
            raise CheckpointError(f"{directory} cannot be loaded: {error}") from error

    def _load(self, common: dict[str, Any], read: Callable[[Wanted], Found], *, weights_only: bool) -> list[str]:
        is_converted = common.get("weights_only", False)
        if weights_only or is_converted:
            return self._load_weights(read, with_extra=not is_converted)
        saved, here = common["content_metadata"], self._content()
        sharded_state.allocate_optimizer_state(self._optimizer, common["optimizer_steps"])
        has_masters, needs_masters = saved["dtype"] == "bfloat16", here["dtype"] == "bfloat16"
        model = sharded_state.model_state(self._model.chunks)
        optimizer = sharded_state.optimizer_state(self._optimizer, model, masters_are_weights=needs_masters and not has_masters)
        if has_masters and not needs_masters:
            sharded_state.read_from_masters(model, {p for chunk in self._model.chunks for p in chunk.parameters() if p.requires_grad})
        rng = [self._rng()] if saved["layout"] == here["layout"] else []
        found = read([*sharded_state.parts_of(model), *optimizer.shards.values(), *rng])
        if found.damaged:
            return found.damaged
        for index, chunk in enumerate(self._model.chunks):
            chunk.load_state_dict(_data_alone(sharded_state.with_objects(model[f"chunk{index}"], found.objects)))
        optimizer.install()
        for streams in rng:
            sharded_state.set_rng_state(found.objects[streams.unique_key])
        if not rng:
            logger.info("another layout than the checkpoint's: random streams start anew, as no rank of it has a counterpart")
        return []

    def _load_weights(self, read: Callable[[Wanted], Found], *, with_extra: bool) -> list[str]:
        """A converted checkpoint (moerl/convert) holds nothing else: the optimizer, if there is one, begins anew, from these weights.
        `with_extra`: what Transformer Engine keeps beside weights, too."""
        model = sharded_state.model_state(self._model.chunks)
        if not with_extra:
            sharded_state.drop_extra_state(model)
        found = read(sharded_state.parts_of(model))
        if found.damaged:
            return found.damaged
        for index, chunk in enumerate(self._model.chunks):
            state = _data_alone(sharded_state.with_objects(model[f"chunk{index}"], found.objects))
            absent = chunk.load_state_dict(state, strict=False).missing_keys
            assert all("._extra_state" in name for name in absent), f"not loaded: {absent}"
        self._optimizer.reload_model_params()
        return []

    def _read(self, directory: Path, contents: Contents, files: FileDigests, wanted: Wanted) -> Found:
        needs: Sequence[Need] | CheckpointError
        try:
            needs = needs_of(contents, wanted)
        except CheckpointError as error:  # for all ranks: they wait for this one
            needs = error
        for each in wanted:
            if isinstance(each, ShardedTensor) and each.allow_shape_mismatch:
                each.data.detach().zero_()  # rows of padding, which the checkpoint need not have
        return read_shards(directory, contents, needs, files)

    def _rng(self) -> Any:
        return sharded_state.rng_state(dist.get_rank(), dist.get_world_size())

    def _content(self) -> dict[str, Any]:
        return {"layout": asdict(self._train.layout), "dtype": self._train.dtype}


def _read_head(directory: Path, files: FileDigests) -> tuple[dict[str, bytes], list[str]]:
    """Collective: the files that all ranks need before the shards, which rank 0 reads and tells the others, and the names of those that
    are not as they were written: none of them may then be read. Raises CheckpointError if one is not among `files`."""
    if absent := [name for name in HEAD if name not in files]:
        raise CheckpointError(f"it has no {absent[0]}")
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        head = {name: (directory / name).read_bytes() for name in HEAD}
        told = [(head, [name for name, data in head.items() if (len(data), xxhash.xxh3_128_hexdigest(data)) != files[name]])]
    dist.broadcast_object_list(told, src=0)
    found: tuple[dict[str, bytes], list[str]] = told[0]
    return found


def _index(data: bytes, files: FileDigests) -> dcp.Metadata:
    try:
        return index_of(data, {name: size for name, (size, _) in files.items()})
    except CheckpointError as error:
        raise CheckpointError(f"{INDEX} is not the index of a checkpoint: {error}") from error


def _data_alone(state: dict[str, Any]) -> dict[str, Any]:
    """The same. Raises CheckpointError for what Transformer Engine would unpickle of it, and is not data."""
    for name, value in state.items():
        if "_extra_state" in name:
            check_extra_state(name, value)
    return state
