"""Write a rank's shards in Megatron's format torch_dist, apart from training: staged at once, written later, by a thread.

    stage     all ranks   who writes what (metadata only, agreed once), then a host copy of this rank's shards
    write     each rank   one file, flushed to disk and read back for its digest; no communication, so it may run beside training
    finish    rank 0      .metadata and common.pt, from what every rank has written

Megatron's own asynchronous writer forks the training process for each save, which with threads, CUDA and a Ray worker in it can
hang, keeps a process of its own alive, and needs collectives between training steps to notice the end. A thread needs none of it:
writing and digests leave the interpreter to the training thread. Megatron's dist_checkpointing.load reads what is written here.
"""

import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import distribute_main_replicas_with_precomputed_distribution
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from moerl.train.checkpoint.checkpoint_dirs import COMMON, HEAD, FileDigests, WrittenShards, digest_files, sync


class ShardWriter:
    def __init__(self, replicas: dist.ProcessGroup):
        """`replicas`: ranks that hold the same weights. Each of those is written by one of them, spread evenly."""
        self._replicas = replicas
        self._distribution: Any = None
        self._items: list[WriteItem] | None = None
        self._host: list[Tensor] = []
        self._staged: list[Tensor | bytes] = []
        self._common: dict[str, Any] = {}
        self._metadata: Metadata | None = None

    def stage(self, sharded_state: dict[str, Any], common: dict[str, Any], *, copies: bool) -> int:
        """Collective; the bytes of the staged tensors of this rank. `common` goes into common.pt: plain values, the same on all ranks.

        `copies`: of the shards in host memory, so that training may go on. The memory is kept for the next save.
        """
        sharded, _ = save_preprocess(sharded_state, validate_access_integrity=False)  # `_plan` does it, on rank 0 alone
        self._share_out(sharded)
        shards = [shard for shard in nested_values(sharded) if is_main_replica(shard.replica_id)]
        self._plan([_write_item(shard) for shard in shards])
        tensors = [_with_leading_axes(shard) for shard in shards if isinstance(shard, ShardedTensor)]
        copied = iter(self._to_host(tensors) if copies else tensors)
        self._staged = [next(copied) if isinstance(shard, ShardedTensor) else _serialized(shard) for shard in shards]
        self._common = common
        return sum(tensor.nbytes for tensor in tensors)

    def _share_out(self, sharded: dict[str, Any]) -> None:
        """Make this rank the main replica of its share. Settled once: it depends on model and layout alone."""
        if self._distribution is None:
            self._distribution = determine_main_replica_uniform_distribution(sharded, self._replicas)
        distribute_main_replicas_with_precomputed_distribution(sharded, self._replicas, self._distribution)

    def _plan(self, items: list[WriteItem]) -> None:
        """Tell rank 0 what is written where; once, like the shares."""
        if self._items is not None:
            assert self._items == items, "the shards of a rank changed between two checkpoints"
            return
        plans: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(SavePlan(items), plans)
        if plans is not None:
            # Refuses shards that overlap or leave a part of a tensor out.
            _, self._metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
        self._items = items

    def _to_host(self, tensors: list[Tensor]) -> list[Tensor]:
        if not self._host:
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.device.type != "cpu") for t in tensors]
        for target, source in zip(self._host, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return self._host

    # -- write and finish ----------------------------------------------------------------------------------------

    def write(self, directory: Path) -> WrittenShards:
        """Write what was staged into this rank's file of `directory`."""
        assert self._items is not None, "nothing was staged"
        name = f"__{dist.get_rank()}_0.distcp"
        with (directory / name).open("wb") as file:
            results = [_write(file, name, item, data) for item, data in zip(self._items, self._staged, strict=True)]
            file.flush()
            os.fsync(file.fileno())
        self._staged = []
        return WrittenShards(files=digest_files(directory, [name]), index=pickle.dumps(results))

    def finish(self, directory: Path, indices: list[bytes]) -> FileDigests:
        """Rank 0, with what every rank's `write` returned."""
        assert self._metadata is not None, "rank 0 finishes a checkpoint"
        writer = FileSystemWriter(directory)
        writer.set_up_storage_writer(True)
        writer.finish(replace(self._metadata), [pickle.loads(index) for index in indices])
        with (directory / COMMON).open("wb") as file:
            _save(self._common, file)
        save_config(CheckpointingConfig("torch_dist", 1), str(directory))
        for name in HEAD:
            sync(directory / name)
        return digest_files(directory, HEAD)


def _write_item(shard: ShardedTensor | ShardedObject) -> WriteItem:
    if isinstance(shard, ShardedObject):
        return WriteItem(MetadataIndex(shard.unique_key), WriteItemType.BYTE_IO)
    offset = torch.Size(shard.global_offset)
    size = torch.Size((1,) * shard.prepend_axis_num + tuple(shard.local_shape))
    properties = TensorProperties(dtype=shard.dtype)
    data = TensorWriteData(ChunkStorageMetadata(offset, size), properties, torch.Size(shard.global_shape))
    return WriteItem(MetadataIndex(shard.key, offset), WriteItemType.SHARD, tensor_data=data)


def _with_leading_axes(shard: ShardedTensor) -> Tensor:
    return shard.data.detach().reshape((1,) * shard.prepend_axis_num + tuple(shard.local_shape))


def _serialized(shard: ShardedObject) -> bytes:
    """As Megatron's loader expects it: a list of one."""
    buffer = io.BytesIO()
    torch.save([shard.data], buffer)
    return buffer.getvalue()


def _write(file: Any, name: str, item: WriteItem, data: Tensor | bytes) -> WriteResult:
    begin = file.tell()
    if isinstance(data, bytes):
        file.write(data)
    else:
        _save(_alone(data.cpu()), file)
    length = file.tell() - begin
    return WriteResult(item.index, length, _StorageInfo(name, begin, length))


def _save(held: Any, file: IO[bytes]) -> None:
    """As torch.save, which tells of its archive's length when the disk refuses a write. Raises OSError then."""
    try:
        torch.save(held, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _alone(tensor: Tensor) -> Tensor:
    """In a storage of its own: torch.save writes whole storages, and a view's is the parameter's or the buffer's."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()
