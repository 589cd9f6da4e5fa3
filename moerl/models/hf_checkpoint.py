"""Hugging Face safetensors checkpoints, one tensor at a time.

Of a published FP8 folder the tensors are what its blocks and their scales stand for: who reads never meets a scale.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moerl.models.expert_stacks import stack_of, stored_name
from moerl.models.fp8_blocks import SCALE_DTYPES, SCALE_NAMES, dequantized
from moerl.models.fp8_names import BLOCK, SCALE_SUFFIX, scale_shape
from moerl.types.errors import CheckpointError
from moerl.types.json_text import read_object

INDEX = "model.safetensors.index.json"
T = TypeVar("T")
_EVERYTHING = slice(None)
_WEIGHT_MAP = TypeAdapter(dict[str, str])
_FP8 = "F8_E4M3"
"""Name of float8_e4m3fn in headers."""


class HFCheckpoint(ExitStack):
    """Reads tensors by name, whichever file holds them. A context manager: files stay mapped until it ends."""

    def __init__(self, directory: Path):
        """Raises CheckpointError naming the index or the single file if it cannot be read."""
        super().__init__()
        self._directory = directory
        self._files = _file_of_each(directory)
        self._open: dict[str, safe_open] = {}

    def names(self) -> list[str]:
        """Without those of scales."""
        return [name for name in self._files if not (name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in self._files)]

    def read(self, name: str, where: slice = _EVERYTHING, dim: int = 0) -> Tensor:
        """Values at `where` along `dim`; also of a part of a stack. Of FP8 the values in float32, and no more of the file is read than the
        blocks around `where`. Raises CheckpointError naming the tensor and its file."""
        if self.is_fp8(name):
            return self._dequantized(name, where, dim)
        stack = stack_of(name)
        index = (slice(None),) * dim + (where,)
        with self._explaining(stored_name(name)):
            if stack is not None:
                return self._file(stack[0]).get_slice(stack[0])[(stack[1], *index)]
            return self._file(name).get_tensor(name) if where == _EVERYTHING else self._file(name).get_slice(name)[index]

    def shape(self, name: str) -> tuple[int, ...]:
        """From the file's header; also of a part of a stack. Raises CheckpointError naming the tensor and its file."""
        stored = stored_name(name)
        with self._explaining(stored):
            shape = tuple(self._file(stored).get_slice(stored).get_shape())
        return shape if stored == name else shape[1:]

    def is_fp8(self, name: str) -> bool:
        """From the file's header. Raises CheckpointError naming the tensor and its file."""
        stored = stored_name(name)
        with self._explaining(stored):
            return self._file(stored).get_slice(stored).get_dtype() == _FP8

    def _dequantized(self, name: str, where: slice, dim: int) -> Tensor:
        shape, scales_name = self.shape(name), name + SCALE_SUFFIX
        with self._explaining(scales_name):
            scales = self._file(scales_name).get_tensor(scales_name)
        if len(shape) != 2 or scales.shape != scale_shape(shape) or scales.dtype not in SCALE_DTYPES:
            raise CheckpointError(
                f"{self._directory / self._files[scales_name]}: {scales_name} has shape {tuple(scales.shape)} in {scales.dtype}, but "
                f"{name} {list(shape)} needs {scale_shape(shape)} in {SCALE_NAMES}; fetch the checkpoint again"
            )
        start, stop, _ = where.indices(shape[dim])
        first, last = start // BLOCK, -(-stop // BLOCK)
        index, blocks = [slice(None), slice(None)], [slice(None), slice(None)]
        index[dim], blocks[dim] = slice(first * BLOCK, min(last * BLOCK, shape[dim])), slice(first, last)
        with self._explaining(name):
            values = self._file(name).get_slice(name)[tuple(index)]
        whole = torch.cat(list(dequantized(values, scales[tuple(blocks)].float(), torch.float32)))
        return whole.narrow(dim, start - first * BLOCK, stop - start)

    def _file(self, name: str) -> safe_open:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = self.enter_context(safe_open(self._directory / file, framework="pt"))
        return self._open[file]

    @contextmanager
    def _explaining(self, name: str) -> Iterator[None]:
        if name not in self._files:
            raise CheckpointError(f"{self._directory}: no file of this checkpoint holds {name}; is it complete, and of this model?")
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._directory / self._files[name]}: cannot read {name} ({error}); fetch this file again") from error


def _file_of_each(directory: Path) -> dict[str, str]:
    index = directory / INDEX
    if index.exists():
        return _weight_map(index)
    single = directory / "model.safetensors"
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{single}: cannot be read ({error}); write or fetch the checkpoint again") from error


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return _WEIGHT_MAP.validate_python(read_object(index)["weight_map"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{index}: cannot be read as an index of safetensors files ({error!r}); fetch this file again") from error


def write_shards(tensors: Iterable[tuple[str, Tensor]], directory: Path, *, shard_bytes: int) -> None:
    """Files of about `shard_bytes` and their index. The caller makes `directory` visible only when this returns."""
    weight_map: dict[str, str] = {}
    total = 0
    on_host = ((name, tensor.detach().contiguous().cpu().clone()) for name, tensor in tensors)
    for number, shard in enumerate(map(dict, by_size(on_host, lambda named: named[1].nbytes, shard_bytes))):
        file = f"model-{number:05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))


def by_size(items: Iterable[T], num_bytes: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Items in their order, in lists of at most `most` bytes or of one item that has more."""
    held: list[T] = []
    size = 0
    for item in items:
        if held and size + num_bytes(item) > most:
            yield held
            held, size = [], 0
        held.append(item)
        size += num_bytes(item)
    if held:
        yield held
