"""Contents of a checkpoint, as text; and whether its files are what was written."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moerl.convert.hf.hf_source import HFSource
from moerl.convert.sharded.megatron_source import megatron_folder, tensors_of_index
from moerl.convert.sharded.sharded_source import ShardedSource, is_sharded
from moerl.convert.tensors.writing import DIGESTS
from moerl.train.checkpoint.checkpoint_dirs import digest_of
from moerl.types.errors import ConvertError, problem
from moerl.types.json_text import is_file_name, read_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def inspection(path: Path, *, verify: bool) -> str:
    """A line for every tensor, then totals. `verify`: every byte is compared with its digest. Raises ConvertError with every fault."""
    folder = megatron_folder(path)
    if folder is not None:
        held = _held_by_index(tensors_of_index(folder))
    else:
        held = _held_by_index(ShardedSource.open(path, verify=verify).tensors()) if is_sharded(path) else _held_by_folder(path)
    verified = verify_digests(path) if verify and not is_sharded(path) else 0
    width = max((len(each.name) for each in held), default=0)
    lines = [f"{each.name:{width}}  {_name(each.dtype):14} {list(each.shape)!s:22} {each.num_bytes:>14}  {each.place}" for each in held]
    totals: dict[torch.dtype, list[Held]] = defaultdict(list)
    for each in held:
        totals[each.dtype].append(each)
    for dtype, tensors in totals.items():
        lines.append(_total(_name(dtype), tensors))
    lines.append(_total("all", held))
    if verify:
        lines.append(f"verified {verified} files" if verified else "verified every file")
    return "\n".join(lines)


def verify_digests(path: Path) -> int:
    """The number of files that are what was written. Raises ConvertError with every other one, and without a file of digests."""
    try:
        entries = {name: (size, digest) for name, (size, digest) in read_object(path / DIGESTS).items()}
        if not all(is_file_name(part) for name in entries for part in name.split("/")):
            raise ValueError("it names files of other folders")
    except (OSError, ValueError, TypeError) as error:
        reason = f"{DIGESTS} cannot be read: {error}"
        raise ConvertError([problem("PATH", str(path), "has no digests", reason, "moerl convert, which writes them")]) from error
    problems = []
    for name, (size, digest) in entries.items():
        file = path / name
        if not file.is_file():
            problems.append(problem("PATH", str(file), "is absent", f"{DIGESTS} lists it", "convert or copy the checkpoint again"))
        elif file.stat().st_size != size or digest_of(file) != digest:
            reason = f"{file.stat().st_size} bytes, written were {size} with another digest"
            problems.append(problem("PATH", str(file), "is not what was written", reason, "convert or copy the checkpoint again"))
    if problems:
        raise ConvertError(problems)
    return len(entries)


def _held_by_folder(path: Path) -> list[Held]:
    return [Held(name=n, dtype=t.dtype, shape=t.shape, place=t.file.name) for n, t in HFSource.open(path).tensors.items()]


def _held_by_index(tensors: Mapping[str, TensorStorageMetadata]) -> list[Held]:
    return [
        Held(name=key, dtype=held.properties.dtype, shape=tuple(held.size), place=f"{len(held.chunks)} pieces")
        for key, held in tensors.items()
    ]


def _total(title: str, tensors: list[Held]) -> str:
    numel, num_bytes = sum(prod(each.shape) for each in tensors), sum(each.num_bytes for each in tensors)
    return f"total {title}: {len(tensors)} tensors, {numel} elements, {num_bytes} bytes ({num_bytes / 1e9:.3f} GB)"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
