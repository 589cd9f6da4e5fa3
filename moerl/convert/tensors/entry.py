"""A tensor that will be written: known by name, dtype and shape before any of it is read, and read in pieces."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

PIECE_BYTES = 2**20
"""About what a piece holds: small enough for a processor's cache, so that checks of a piece are nearly free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]
    """Tensors of `dtype` that follow each other in memory, together the whole row-major tensor; of any shape. A piece is valid until the
    next one is asked for. May run on any thread."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def computed(name: str, dtype: torch.dtype, shape: tuple[int, ...], make: Callable[[], Tensor]) -> Entry:
    """Entry of a tensor that `make` returns, in `dtype` and `shape`, when it is written."""

    def pieces() -> Iterator[Tensor]:
        tensor = make()
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), f"{name}: {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}"
        yield tensor

    return Entry(name=name, dtype=dtype, shape=shape, pieces=pieces)


def read_whole(entry: Entry) -> Tensor:
    """In memory of its own."""
    tensor, at = torch.empty(entry.shape, dtype=entry.dtype), 0
    flat = tensor.view(-1)
    for piece in entry.pieces():
        flat[at : at + piece.numel()] = piece.reshape(-1)
        at += piece.numel()
    assert at == flat.numel(), f"{entry.name}: {at} elements, not {flat.numel()}"
    return tensor
