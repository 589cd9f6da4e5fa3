"""Save and load the state of an engine: a checkpoint of any layout and dtype loads into any other, each rank reading what it needs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from torch.distributed.checkpoint import CheckpointException

from moerl.config.schema.train_config import TrainConfig
from moerl.train.checkpoint import sharded_state
from moerl.train.checkpoint.checkpoint_dirs import FileDigests, WrittenShards
from moerl.train.checkpoint.checkpoint_pickles import check_extra_state, read_as_data, why_refused
from moerl.train.checkpoint.shard_writer import ShardWriter
from moerl.train.megatron.megatron_model import Model
from moerl.types.errors import CheckpointError

logger = logging.getLogger(__name__)


class ShardStore:
    def __init__(self, model: Model, optimizer: Any, train: TrainConfig):
        self._model, self._optimizer, self._train = model, optimizer, train
        self._writer = ShardWriter(parallel_state.get_data_parallel_group(with_context_parallel=True))

    def stage(self, *, copies: bool) -> int:
        """Collective: fix what `write` will write. Returns the bytes of this rank's shards.

        `copies`: to host memory, so that training may go on during `write`; without, it may not.
        """
        model = sharded_state.model_state(self._model.chunks)
        if not sharded_state.has_stepped(self._optimizer):  # no update of the run so far was applied
            sharded_state.begin_optimizer_state(self._optimizer)
        optimizer = sharded_state.optimizer_state(self._optimizer, model)
        common = {"optimizer_steps": sharded_state.num_optimizer_steps(self._optimizer), "content_metadata": self._content()}
        self._writer.stage({"model": model, "optimizer": optimizer.shards, "rng": self._rng()}, common, copies=copies)
        return self._writer.num_bytes

    def write(self, directory: Path) -> WrittenShards:
        """This rank's file. Not collective, and on any thread."""
        return self._writer.write(directory)

    def finish(self, directory: Path, indices: list[bytes]) -> FileDigests:
        """Rank 0, when every rank has written; what the ranks' `write` returned, by rank. The directory is then complete."""
        return self._writer.finish(directory, indices)

    def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """Collective, in place: no more memory than one stored tensor at a time. The files must have been verified.

        Raises CheckpointError, also if something in them is not data: a checkpoint runs nothing."""
        with _as_checkpoint_error(directory), read_as_data(directory):
            self._load(directory, weights_only=weights_only)

    def _load(self, directory: Path, *, weights_only: bool) -> None:
        common = dist_checkpointing.load_common_state_dict(str(directory))
        is_converted = common.get("weights_only", False)
        if weights_only or is_converted:
            self._load_weights(directory, with_extra=not is_converted)
            return
        saved, here = common["content_metadata"], self._content()
        sharded_state.allocate_optimizer_state(self._optimizer, common["optimizer_steps"])
        has_masters, needs_masters = saved["dtype"] == "bfloat16", here["dtype"] == "bfloat16"
        model = sharded_state.model_state(self._model.chunks)
        optimizer = sharded_state.optimizer_state(self._optimizer, model, masters_are_weights=needs_masters and not has_masters)
        if has_masters and not needs_masters:
            sharded_state.read_from_masters(model, {p for chunk in self._model.chunks for p in chunk.parameters()})
        same_ranks = saved["layout"] == here["layout"]
        rng = {"rng": self._rng()} if same_ranks else {}
        state = dist_checkpointing.load({"model": model, **rng}, str(directory))
        # Apart: masters may come from weights that are also read as such.
        dist_checkpointing.load(optimizer.shards, str(directory))
        for index, chunk in enumerate(self._model.chunks):
            chunk.load_state_dict(_data_alone(state["model"][f"chunk{index}"]))
        optimizer.install()
        if same_ranks:
            sharded_state.set_rng_state(state["rng"])
        else:
            logger.info("another layout than the checkpoint's: random streams start anew, as no rank of it has a counterpart")

    def _load_weights(self, directory: Path, *, with_extra: bool) -> None:
        """A converted checkpoint (moerl/convert) holds nothing else: the optimizer, if there is one, begins anew, from these weights.
        `with_extra`: what Transformer Engine keeps beside weights, too."""
        model = sharded_state.model_state(self._model.chunks)
        if not with_extra:
            sharded_state.drop_extra_state(model)
        state = dist_checkpointing.load({"model": model}, str(directory))
        for index, chunk in enumerate(self._model.chunks):
            absent = chunk.load_state_dict(_data_alone(state["model"][f"chunk{index}"]), strict=False).missing_keys
            assert all("._extra_state" in name for name in absent), f"not loaded: {absent}"
        self._optimizer.reload_model_params()

    def _rng(self) -> Any:
        return sharded_state.rng_state(dist.get_rank(), dist.get_world_size())

    def _content(self) -> dict[str, Any]:
        return {"layout": asdict(self._train.layout), "dtype": self._train.dtype}


def _data_alone(state: dict[str, Any]) -> dict[str, Any]:
    """The same. Raises CheckpointError for what Transformer Engine would unpickle of it, and is not data."""
    for name, value in state.items():
        if "_extra_state" in name:
            check_extra_state(name, value)
    return state


@contextmanager
def _as_checkpoint_error(directory: Path) -> Iterator[None]:
    """PyTorch's own derives from BaseException, which would end a Ray worker instead of reaching the driver."""
    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        refused = next((cause for cause in causes if isinstance(cause, CheckpointError | UnpicklingError)), None)
        raise CheckpointError(f"{directory} cannot be loaded: {error if refused is None else why_refused(refused)}") from error
    except (CheckpointError, UnpicklingError) as error:
        raise CheckpointError(f"{directory} cannot be loaded: {why_refused(error)}") from error
