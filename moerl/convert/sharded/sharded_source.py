"""Read and write the sharded checkpoints of training runs without ranks, one tensor at a time.

What is written holds weights alone: no moments, no masters, no random streams. A run that loads it starts its optimizer anew.
"""

import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from moerl.convert.tensors.count_nonfinite import NONFINITE, NonFinite, count_nonfinite
from moerl.convert.tensors.entry import Entry
from moerl.convert.tensors.writing import FileJob, Finished, Output
from moerl.models.hf_checkpoint import by_size
from moerl.train.checkpoint.checkpoint_check import check, content_faults, damaged, read_manifest
from moerl.train.checkpoint.checkpoint_dirs import MANIFEST, STATE, digest_files, manifest_text
from moerl.train.checkpoint.checkpoint_pickles import load_tensor, read_index
from moerl.types.errors import CheckpointError, ConvertError, can_be, problem

_NOT_WEIGHTS = ("optimizer.", "chained_", "rng/", "rng.")
"""Begins of keys, with those of Megatron's chained optimizers."""
FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


def is_sharded(directory: Path) -> bool:
    """A run's checkpoint, whole or not. What others wrote has an index as well, but neither of these files."""
    return can_be(directory) and ((directory / MANIFEST).exists() or (directory / STATE).exists())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedSource:
    directory: Path
    config: Mapping[str, Any]
    """config.json of the model that was trained."""
    metadata: Metadata
    _places: dict[str, Mapping[tuple[int, ...], list[ChunkStorageMetadata]]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, directory: Path, *, verify: bool = True) -> "ShardedSource":
        """Raises ConvertError with every damaged file; `verify`: of those whose names and sizes show nothing too."""
        try:
            check(directory)
            manifest = read_manifest(directory)
            if faults := content_faults(directory, sorted(manifest.files) if verify else [".metadata"]):
                raise damaged(directory, faults)
            index = read_index(directory)
        except CheckpointError as error:
            raise ConvertError([problem("SRC", str(directory), "must be whole", str(error), "another checkpoint")]) from error
        return cls(directory=directory, config=manifest.model, metadata=index)

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Every tensor, the optimizer's too."""
        return {key: held for key, held in self.metadata.state_dict_metadata.items() if isinstance(held, TensorStorageMetadata)}

    def weights(self) -> dict[str, TensorStorageMetadata]:
        return {key: held for key, held in self.tensors().items() if not key.startswith(_NOT_WEIGHTS) and "_extra_state" not in key}

    def read(self, key: str, place: tuple[int, ...] = ()) -> Tensor:
        """Whole, or what it has at `place` on its leading axes."""
        held, leading = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[key]), len(place)
        result = torch.empty(tuple(held.size)[leading:], dtype=held.properties.dtype)
        for chunk in self._chunks_at(key, leading)[place]:
            inside = tuple(at - begin for at, begin in zip(place, chunk.offsets, strict=False))
            part = self._stored(key, chunk, held.properties.dtype)[inside]
            offsets = tuple(chunk.offsets)[leading:]
            result[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))] = part
        return result

    def _chunks_at(self, key: str, leading: int) -> Mapping[tuple[int, ...], list[ChunkStorageMetadata]]:
        """Chunks of a key by each place on its `leading` axes. Kept: a stack has a place for every expert of every layer."""
        if key not in self._places:
            places = defaultdict(list)
            for chunk in self.tensors()[key].chunks:
                ranges = (range(at, at + size) for at, size in zip(chunk.offsets[:leading], chunk.sizes[:leading], strict=True))
                for place in product(*ranges):
                    places[place].append(chunk)
            self._places[key] = places
        return self._places[key]

    def _stored(self, key: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Tensor:
        """Raises ConvertError if its bytes are no tensor of the chunk's size and dtype."""
        place = self.metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        with (self.directory / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            try:
                return load_tensor(io.BytesIO(file.read(place.length)), chunk.sizes, dtype)
            except CheckpointError as error:
                path = f"{self.directory / place.relative_path}: {key}"
                raise ConvertError([problem("SRC", path, "must hold what the index says", str(error), "another checkpoint")]) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPart:
    """A box of a stored tensor."""

    entry: Entry
    key: str
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def size(self) -> tuple[int, ...]:
        return (1,) * (len(self.global_shape) - len(self.entry.shape)) + self.entry.shape


def sharded_jobs(parts: Sequence[ShardPart], *, shard_bytes: int, nonfinite: NonFinite) -> list[FileJob]:
    files = by_size(parts, lambda part: part.entry.num_bytes, shard_bytes)
    return [_job(f"__{index}_0.distcp", held, nonfinite) for index, held in enumerate(files)]


def _job(name: str, parts: Sequence[ShardPart], nonfinite: NonFinite) -> FileJob:
    def write(output: Output) -> dict[str, Any]:
        places, counts = [], {}
        for part in parts:
            begin = output.tell()
            (tensor,) = part.entry.pieces()
            torch.save(tensor.reshape(part.size).clone(), cast(IO[bytes], output))
            places.append([begin, output.tell() - begin])
            if nonfinite != "ignore" and (count := count_nonfinite(tensor)):
                counts[part.entry.name] = count
        return {"places": places, NONFINITE: counts}

    contents = [[part.key, part.offset, part.size, str(part.entry.dtype)] for part in parts]
    return FileJob(name=name, num_bytes=sum(part.entry.num_bytes for part in parts), contents=contents, write=write)


def write_index(directory: Path, parts: Sequence[ShardPart], finished: Sequence[Finished], others: Sequence[WriteResult] = ()) -> None:
    """The index of shards in `directory`, and of `others`: bytes that are no tensors."""
    held: dict[str, Any] = {each.index.fqn: BytesStorageMetadata() for each in others}
    results, waiting = list(others), iter(parts)
    for each in finished:
        for begin, length in each.notes["places"]:
            part = next(waiting)
            properties = TensorProperties(dtype=part.entry.dtype)
            tensor = held.setdefault(part.key, TensorStorageMetadata(properties, torch.Size(part.global_shape), []))
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.size)))
            place = _StorageInfo(Path(each.name).name, begin, length)
            results.append(WriteResult(MetadataIndex(part.key, torch.Size(part.offset)), length, place))
    writer = FileSystemWriter(directory)
    writer.set_up_storage_writer(True)
    writer.finish(Metadata(held), [results])


def complete_sharded(
    directory: Path, parts: Sequence[ShardPart], finished: Sequence[Finished], config: Mapping[str, Any], dtype: str
) -> None:
    """The files that make shards a checkpoint of version 0."""
    write_index(directory, parts, finished)
    common = {"optimizer_steps": 0, "weights_only": True, "content_metadata": {"layout": None, "dtype": dtype}}
    torch.save(common, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(FORMAT))
    (directory / STATE).write_text(json.dumps({"version": 0, "weights_only": True}))
    files = {each.name: (each.size, each.digest) for each in finished}
    files |= digest_files(directory, ["common.pt", "metadata.json", ".metadata", STATE])
    (directory / MANIFEST).write_text(manifest_text({"model": config, "files": files}))
