"""Pickles of a checkpoint, read as data: it may come from anybody, its digests too, and a plain unpickler calls whatever it names.

.metadata       of torch.distributed.checkpoint: classes of `_INDEX_CLASSES` and no others
shards          torch.load with weights_only: tensors, and what torch and Megatron name as safe; so common.pt
_extra_state    of Transformer Engine, pickled into a tensor: tensors and recipes of FP8
"""

import collections
import io
import os
import pathlib
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from moerl.train.checkpoint.checkpoint_dirs import INDEX
from moerl.types.errors import CheckpointError

_INDEX_CLASSES = (
    dcp.Metadata, dcp.MetadataIndex, dcp.TensorStorageMetadata, dcp.BytesStorageMetadata, dcp.TensorProperties,
    dcp.ChunkStorageMetadata, dcp.StorageMeta, dcp._MEM_FORMAT_ENCODING, filesystem._StorageInfo,
)  # fmt: skip
_PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
"""Classes of torch.distributed.checkpoint.planner that Megatron leaves in the index: how each rank wrote, which no reader asks for."""
_BLOCK = 256
"""Chunks that are compared with all others at a time."""
_PICKLE_BYTES = 4096
"""Bound of the pickle of a stored tensor: 150 are usual."""
_SETS = (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET)
_OF_KEYS = {opcode.decode("latin-1") for opcode in (pickle.SETITEM, pickle.SETITEMS, pickle.DICT, *_SETS)}
_RECIPES = "transformer_engine.common.recipe"
_OF_MEGATRON = "megatron.core.extensions.transformer_engine"
"""Has recipes of its own, which are Transformer Engine's too."""
_STORAGE_OF_MEGATRON = ("megatron.core.safe_globals", "safe_load_from_bytes")
"""Takes the place of torch.storage._load_from_bytes from Megatron-Core 0.19 on; pickled tensors name it, and no older one can read them."""

_Allowed = Callable[[str, str], Any]
"""Value of a name of a module; None: not allowed."""


_Reader: Any = pickle._Unpickler
"""Python's reader in Python: that in C takes memory for the largest number of its memo, and hashes keys as soon as it has them."""


class _Unpickler(_Reader):
    """Reader that knows few names, and hashes no key that takes as long as its writer likes, such as tuples in tuples."""

    dispatch: ClassVar[Any] = dict(_Reader.dispatch)

    def __init__(self, file: io.BufferedIOBase, allowed: _Allowed):
        super().__init__(file)
        self._allowed = allowed

    def _set_item(self) -> None:
        _check_key(self.stack[-2])
        _Reader.load_setitem(self)

    def _set_items(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        _Reader.load_setitems(self)

    def _make_dict(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        _Reader.load_dict(self)

    def _make_set(self) -> None:
        raise pickle.UnpicklingError("it has a set, and no checkpoint has one")

    dispatch[pickle.SETITEM[0]] = _set_item
    dispatch[pickle.SETITEMS[0]] = _set_items
    dispatch[pickle.DICT[0]] = _make_dict
    for _opcode in _SETS:
        dispatch[_opcode[0]] = _make_set

    def find_class(self, module: str, name: str) -> Any:
        found = self._allowed(module, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no data of a checkpoint")
        return found


def _check_key(key: Any) -> None:
    """Raises UnpicklingError for a key that is slow to hash, or may be."""
    if isinstance(key, dcp.MetadataIndex):
        parts = (key.fqn, str), (key.offset, torch.Size | None), (key.index, int | None)
        is_plain = all(isinstance(part, kind) for part, kind in parts)
    else:
        is_plain = type(key) in (str, int)
    if not is_plain:
        raise pickle.UnpicklingError(f"it has a {type(key).__name__} as a key, which is none of a checkpoint")


def read_index(directory: Path, *, file_bytes: Mapping[str, int] | None = None) -> dcp.Metadata:
    """The index of torch.distributed.checkpoint: where in which file of `directory` each tensor lies. `file_bytes`: sizes that the
    files should have; None: those they have.

    Raises CheckpointError if it is damaged or names anything but data; nothing of it has run then.
    """
    try:
        if file_bytes is None:
            file_bytes = {entry.name: entry.stat().st_size for entry in os.scandir(directory) if entry.is_file()}
        return index_of((directory / INDEX).read_bytes(), file_bytes)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{directory / INDEX} cannot be read as the index of a checkpoint: {why_refused(error)}") from error


def index_of(data: bytes, file_bytes: Mapping[str, int]) -> dcp.Metadata:
    """The same of its bytes. Raises CheckpointError with the reason alone."""
    try:
        index = _load_index(data)
        _check_index(index, file_bytes)
    except (Exception, RecursionError) as error:  # whatever classes of torch make of arguments that were never theirs
        raise CheckpointError(why_refused(error)) from error
    return index


def _load_index(data: bytes) -> Any:
    before = {each: dict(vars(each)) for each in _INDEX_CLASSES}
    try:
        return _Unpickler(io.BytesIO(data), _of_index).load()
    finally:
        for each, attributes in before.items():
            _undo(each, attributes)


def load_object(data: bytes) -> Any:
    """Object that is no tensor, from the bytes that torch.save wrote. Raises CheckpointError if it is no data."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own, of bytes that it has never written
        raise CheckpointError(why_refused(error)) from error


def _undo(each: type, attributes: Mapping[str, Any]) -> None:
    """Pickles may set attributes of every object that they name, classes too."""
    for name in vars(each).keys() - attributes.keys():
        delattr(each, name)
    for name in [name for name, value in attributes.items() if vars(each)[name] is not value]:
        setattr(each, name, attributes[name])


def _of_index(module: str, name: str) -> Any:
    if module == "torch":
        found = getattr(torch, name, None) if name.isidentifier() else None
        return found if found is torch.Size or isinstance(found, torch.dtype) else None
    if (module, name) == ("torch.serialization", "_get_layout"):
        return lambda name: torch.serialization._get_layout(name)  # one of its own: a pickle may set attributes of what it names
    if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "PurePosixPath"):
        return type("Folder", (pathlib.PurePosixPath,), {})  # it was written into, which nobody asks for
    if module == "torch.distributed.checkpoint.planner" and name in _PLANS:
        return type("Plan", (), {"__init__": lambda self, *values: None})
    return next((each for each in _INDEX_CLASSES if (each.__module__, each.__qualname__) == (module, name)), None)


def _check_index(index: Any, file_bytes: Mapping[str, int]) -> None:
    """Every part of it is of its class, and lies in its file. Raises ValueError."""
    if not isinstance(index, dcp.Metadata):
        raise ValueError(f"it holds {type(index).__name__}, not Metadata")
    for key, place in index.storage_data.items():
        _require(isinstance(key, dcp.MetadataIndex) and isinstance(place, filesystem._StorageInfo), f"of {key!r}: no place in a file")
        size = file_bytes.get(place.relative_path, -1)
        _require(type(place.offset) is type(place.length) is int, f"of {key.fqn}: no place in a file")
        _require(0 <= place.offset <= place.offset + place.length <= size, f"{key.fqn} does not lie in a file of the checkpoint")
    for key, held in index.state_dict_metadata.items():
        if isinstance(held, dcp.TensorStorageMetadata):
            _check_tensor(index, key, held)
        else:
            _require(isinstance(held, dcp.BytesStorageMetadata), f"{key!r} is neither a tensor nor bytes")


def _check_tensor(index: dcp.Metadata, key: str, held: dcp.TensorStorageMetadata) -> None:
    """Its chunks have together as many elements as it, and each as many bytes as its elements need: no tensor is larger than its files."""
    _require(isinstance(held.size, torch.Size) and isinstance(held.properties.dtype, torch.dtype), f"{key} has no size or no dtype")
    for chunk in held.chunks:
        _require(isinstance(chunk.offsets, torch.Size) and isinstance(chunk.sizes, torch.Size), f"a chunk of {key} has no place")
        bounds = zip(chunk.offsets, chunk.sizes, held.size, strict=True)
        _require(all(0 <= offset <= offset + size <= limit for offset, size, limit in bounds), f"a chunk of {key} lies outside of it")
        stored = index.storage_data[dcp.MetadataIndex(key, chunk.offsets)].length
        _require(prod(chunk.sizes) * held.properties.dtype.itemsize <= stored, f"a chunk of {key} is larger than its bytes")
    whole = sum(prod(chunk.sizes) for chunk in held.chunks) == prod(held.size)
    _require(whole and not _overlap(held.chunks), f"the chunks of {key} are not the whole of it, each part once")


def _overlap(chunks: Sequence[dcp.ChunkStorageMetadata]) -> bool:
    """Whether two of them have an element in common. A block of rows of the table of all pairs at a time."""
    boxes = [chunk for chunk in chunks if prod(chunk.sizes)]
    if len(boxes) < 2:
        return False
    begins = np.array([list(chunk.offsets) for chunk in boxes], dtype=np.int64)
    ends = begins + np.array([list(chunk.sizes) for chunk in boxes], dtype=np.int64)
    for first in range(0, len(boxes), _BLOCK):
        rows = slice(first, first + _BLOCK)
        meet = ((begins[rows, None] < ends[None]) & (begins[None] < ends[rows, None])).all(axis=2)
        if meet.sum() > len(begins[rows]):  # each meets itself
            return True
    return False


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def load_tensor(data: io.BytesIO, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A stored tensor, from the bytes that torch.save wrote. Raises CheckpointError for anything else, also than the index says."""
    try:
        _check_archive(zipfile.ZipFile(data))
        data.seek(0)
        loaded = torch.load(data, map_location="cpu", weights_only=True)
        if not isinstance(loaded, Tensor):
            raise ValueError(f"it holds {type(loaded).__name__}, not a tensor")
    except Exception as error:  # torch's own, of bytes that it has never written
        raise CheckpointError(f"a stored tensor cannot be read: {why_refused(error)}") from error
    if tuple(loaded.shape) != tuple(shape) or loaded.dtype != dtype:
        raise CheckpointError(f"found {loaded.dtype} {tuple(loaded.shape)}, the index says {dtype} {tuple(shape)}")
    return loaded


def _check_archive(archive: zipfile.ZipFile) -> None:
    """Raises ValueError where reading it with weights_only could take long or much: torch's reader hashes what it is told to."""
    parts = archive.infolist()
    _require(all(each.compress_type == zipfile.ZIP_STORED for each in parts), "its parts are compressed, and torch compresses none")
    pickles = [each for each in parts if each.filename.endswith(".pkl")]
    _require(len(pickles) == 1 and pickles[0].file_size <= _PICKLE_BYTES, "its pickle is not that of one tensor")
    opcodes = {opcode.code for opcode, _, _ in pickletools.genops(archive.read(pickles[0]))}
    _require(opcodes.isdisjoint(_OF_KEYS), "its pickle has keys or sets, and that of a tensor has none")


def check_extra_state(name: str, state: Any) -> None:
    """State that Transformer Engine would unpickle into a module. Raises CheckpointError if it names anything but data."""
    if not isinstance(state, Tensor) or state.numel() == 0:
        return
    before: dict[type, dict[str, Any]] = {}

    def noted(module: str, name: str) -> Any:
        found = _of_extra_state(module, name)
        if isinstance(found, type):
            before.setdefault(found, dict(vars(found)))
        return found

    try:
        _Unpickler(io.BytesIO(state.detach().cpu().numpy().tobytes()), noted).load()
    except (Exception, RecursionError) as error:
        raise CheckpointError(f"{name} cannot be read: {why_refused(error)}") from error
    finally:
        for each, attributes in before.items():
            _undo(each, attributes)


def _of_extra_state(module: str, name: str) -> Any:
    def load_storage(data: bytes) -> Any:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)

    known: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor_v2"): lambda *parts: torch._utils._rebuild_tensor_v2(*parts),
        ("torch.storage", "_load_from_bytes"): load_storage,
        ("collections", "OrderedDict"): collections.OrderedDict,
    }
    if (module, name) == _STORAGE_OF_MEGATRON:
        return load_storage if hasattr(import_module(module), name) else None
    if module in (_RECIPES, _OF_MEGATRON) and name.isidentifier():
        found = getattr(import_module(module), name, None)
        return found if isinstance(found, type) and any(each.__module__ == _RECIPES for each in found.__mro__) else None
    return known.get((module, name))


def why_refused(error: BaseException) -> str:
    """Reason in a line: torch explains at length how to trust a file."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    blocked = next((line for line in lines if "Unsupported" in line or "GLOBAL" in line), None)
    text = blocked or (lines[0] if lines else type(error).__name__)
    return text if len(text) <= 300 else f"{text[:300]}..."
