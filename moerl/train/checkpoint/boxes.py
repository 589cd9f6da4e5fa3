"""A flat range of a tensor as boxes of it: what the distributed optimizer owns, in the terms of a sharded checkpoint. Pure functions.

The distributed optimizer cuts the flattened parameters of a rank into ranges that begin and end anywhere; a sharded checkpoint
stores boxes (an offset and a size along every axis). Invariants, for a row-major tensor: the boxes of a range are disjoint, cover
exactly the range, follow each other in memory, each is contiguous, and there are at most 2 * ndim - 1 of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Those of elements [start, stop) of a row-major tensor of `shape`, in the order of memory; none for an empty range."""
    assert 0 <= start <= stop <= prod(shape), f"[{start}, {stop}) is no range of a tensor of shape {shape}"
    if start == stop:
        return
    if len(shape) == 1:
        yield Box(offset=(start,), shape=(stop - start,))
        return
    row = prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:  # within one row
        yield from _in_row(shape, end_whole, start, stop)
        return
    yield from _in_row(shape, first_whole - 1, start, first_whole * row)
    if first_whole < end_whole:
        yield Box(offset=(first_whole, *(0 for _ in shape[1:])), shape=(end_whole - first_whole, *shape[1:]))
    yield from _in_row(shape, end_whole, end_whole * row, stop)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    begin = row * prod(shape[1:])
    for box in boxes_of_range(shape[1:], start - begin, stop - begin) if start < stop else ():
        yield Box(offset=(row, *box.offset), shape=(1, *box.shape))
