"""Hugging Face safetensors checkpoints, one tensor at a time."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moerl.models.expert_stacks import stack_of, stored_name
from moerl.types.errors import CheckpointError
from moerl.types.json_text import read_object

INDEX = "model.safetensors.index.json"
_WEIGHT_MAP = TypeAdapter(dict[str, str])


class HFCheckpoint:
    """Reads tensors by name, whichever file holds them. A context manager: files stay mapped until it ends."""

    def __init__(self, directory: Path):
        """Raises CheckpointError naming the index or the single file if it cannot be read."""
        self._directory = directory
        self._files = _file_of_each(directory)
        self._stack = ExitStack()
        self._open: dict[str, safe_open] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def names(self) -> list[str]:
        return list(self._files)

    def read(self, name: str) -> Tensor:
        """Also a part of a stack. Raises CheckpointError naming the tensor and its file."""
        stack = stack_of(name)
        with self._explaining(stored_name(name)):
            if stack is None:
                return self._file(name).get_tensor(name)
            return self._file(stack[0]).get_slice(stack[0])[stack[1]]

    def shape(self, name: str) -> tuple[int, ...]:
        """From the file's header. Raises CheckpointError naming the tensor and its file."""
        with self._explaining(name):
            return tuple(self._file(name).get_slice(name).get_shape())

    def _file(self, name: str) -> safe_open:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self._directory / file, framework="pt"))
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
    for number, shard in enumerate(_shards(tensors, shard_bytes)):
        file = f"model-{number:05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().contiguous().cpu().clone()
        size += tensor.nbytes
    if shard:
        yield shard
