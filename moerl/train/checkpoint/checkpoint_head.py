"""Head of a checkpoint, which all ranks need before its shards: rank 0 reads it, digests it and tells the others."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint import metadata as dcp

from moerl.train.checkpoint.checkpoint_dirs import COMMON, HEAD, INDEX, FileDigests
from moerl.train.checkpoint.checkpoint_pickles import index_of, load_object
from moerl.types.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHead:
    index: bytes
    common: bytes
    damaged: list[str]
    """Files whose bytes are not those that were written: neither of the others may then be read."""

    def read_index(self, files: FileDigests) -> dcp.Metadata:
        """Raises CheckpointError if it is no index of these files."""
        try:
            return index_of(self.index, {name: size for name, (size, _) in files.items()})
        except CheckpointError as error:
            raise CheckpointError(f"{INDEX} is not the index of a checkpoint: {error}") from error

    def read_common(self) -> dict[str, Any]:
        """Raises CheckpointError if it is no data."""
        common = load_object(self.common)
        if not isinstance(common, dict):
            raise CheckpointError(f"{COMMON} holds {type(common).__name__}, not settings")
        return common


def read_head(directory: Path, files: FileDigests) -> CheckpointHead:
    """Collective. `files`: sizes and digests that they should have. Raises CheckpointError if one of the head is not among them."""
    if absent := [name for name in HEAD if name not in files]:
        raise CheckpointError(f"it has no {absent[0]}")
    told: list[CheckpointHead | None] = [_read(directory, files) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0)
    assert told[0] is not None, "rank 0 tells it"
    return told[0]


def _read(directory: Path, files: FileDigests) -> CheckpointHead:
    read = {name: (directory / name).read_bytes() for name in HEAD}
    damaged = [name for name, data in read.items() if (len(data), xxhash.xxh3_128_hexdigest(data)) != files[name]]
    return CheckpointHead(index=read[INDEX], common=read[COMMON], damaged=damaged)
