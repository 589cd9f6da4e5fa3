"""The safetensors format at the level of bytes: headers without mapping a file, pieces of tensors, and files written as a stream.

Mapped pages count as the process's memory; read() into one small buffer does not, whatever the file's size.
Format: 8 bytes little-endian length, that much JSON, then the tensors (https://github.com/huggingface/safetensors, README.md, "Format").
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from moerl.convert.tensors.entry import PIECE_BYTES, Entry
from moerl.types.json_text import parse_json

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES, _MAX_HEADER_BYTES, _MAX_AXES = 8, 100_000_000, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """In bytes from the start of the file."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def part(self, place: int) -> "StoredTensor":
        """Where that lies which it has at `place` on its first axis."""
        return replace(self, shape=self.shape[1:], begin=self.begin + place * self.num_bytes // self.shape[0])


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of `file`. Raises OSError, and ValueError saying what is wrong, also if the file is shorter or longer than it says."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or not 2 <= length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise ValueError(f"{size} bytes, too few for its header")
        entries = parse_json(opened.read(length))
    if not isinstance(entries, dict):
        raise ValueError(f"its header is no object but {type(entries).__name__}")
    first = _LENGTH_BYTES + length
    tensors = {name: _stored(file, name, entry, first) for name, entry in entries.items() if name != "__metadata__"}
    expected = max((tensor.begin + tensor.num_bytes for tensor in tensors.values()), default=first)
    if size != expected:
        raise ValueError(f"{size} bytes, should be {expected}: {'truncated' if size < expected else 'longer than its header says'}")
    _check_places(tensors, first)
    return tensors


def _check_places(tensors: Mapping[str, StoredTensor], first: int) -> None:
    """Tensors follow each other: two on the same bytes would be two names of one, and bytes between them nobody's."""
    at, before = first, "its header"
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if stored.begin != at:
            how = "overlaps" if stored.begin < at else "leaves bytes unused behind"
            raise ValueError(f"its header lets {name} begin at byte {stored.begin}, which {how} {before}, that ends at {at}")
        at, before = at + stored.num_bytes, name


def _stored(file: Path, name: str, entry: Any, first: int) -> StoredTensor:
    try:
        name.encode()
        (begin, end), shape = entry["data_offsets"], entry["shape"]
        if not (isinstance(shape, list) and len(shape) <= _MAX_AXES and all(_is_size(each) for each in (begin, end, *shape))):
            raise ValueError(f"shape and data_offsets must be lists of sizes, of at most {_MAX_AXES} axes")
        stored = StoredTensor(file=file, dtype=DTYPES[entry["dtype"]], shape=tuple(shape), begin=first + begin)
    except (KeyError, TypeError, ValueError) as error:
        text = repr(error)
        reason = text if len(text) <= 200 else f"{text[:200]}..."
        raise ValueError(f"its header does not describe {name[:200]!a}: {reason}") from error
    if stored.num_bytes != end - begin:
        raise ValueError(f"its header gives {name} {end - begin} bytes, but its shape and dtype need {stored.num_bytes}")
    return stored


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48


def read_pieces(stored: StoredTensor, *, piece_bytes: int = PIECE_BYTES, row_multiple: int | None = None) -> Iterator[Tensor]:
    """Flat pieces, or with `row_multiple` pieces of that many whole rows (the last may have fewer), in the stored dtype.

    All share one buffer: a piece is valid until the next one. Raises EOFError if the file ends too early.
    """
    rows = 1 if row_multiple is None else max(1, prod(stored.shape[1:]))
    unit = stored.dtype.itemsize * rows * (1 if row_multiple is None else row_multiple)
    step = max(1, piece_bytes // unit) * unit
    buffer = torch.empty(min(step, stored.num_bytes), dtype=torch.uint8)
    with stored.file.open("rb", buffering=0) as opened:
        opened.seek(stored.begin)
        for at in range(0, stored.num_bytes, step):
            part = buffer[: min(step, stored.num_bytes - at)]
            _fill(opened, part, stored.file)
            piece = part.view(stored.dtype)
            yield piece if row_multiple is None else piece.view(-1, *stored.shape[1:])


def _fill(opened: BinaryIO, part: Tensor, file: Path) -> None:
    view = memoryview(part.numpy())  # type: ignore[arg-type]
    while len(view):
        count = opened.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise EOFError(f"{file} ends too early")
        view = view[count:]


def read_tensor(stored: StoredTensor) -> Tensor:
    """The whole tensor, in memory of its own."""
    if stored.num_bytes == 0:
        return torch.empty(stored.shape, dtype=stored.dtype)
    return next(read_pieces(stored, piece_bytes=stored.num_bytes)).view(stored.shape)


def header_of(entries: Sequence[Entry]) -> bytes:
    """Bytes that precede the tensors, which follow in this order."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        described[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, at + entry.num_bytes]}
        at += entry.num_bytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def bytes_of(piece: Tensor) -> memoryview:
    return memoryview(piece.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
