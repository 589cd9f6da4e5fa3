"""The command line of a process as the system shows it, for one that was forked: what it would have been executed as."""

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path

_FIRST_FIELD = 48
"""Fields, of four, in /proc/self/stat, counted from 1: start and end of the command line, start and end of the environment."""


def set_title(argv: Sequence[str]) -> None:
    """Written over the memory of the first command line, and of the environment behind it; cut where both end."""
    start, size = _place()
    # The system takes a command line whose last byte is not 0 for one that goes on in the environment, up to a 0.
    text = b" ".join(part.encode() for part in argv)[: max(0, size - 1)]
    if size:
        ctypes.memset(start, 0, size)
        ctypes.memmove(start, text, len(text))


@functools.cache
def _place() -> tuple[int, int]:
    """(address, size), of size 0 where the system does not say. The first call gives every variable memory of its own: the C library
    points into the memory that is overwritten."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from the third on
        first, last, start, end = map(int, fields[_FIRST_FIELD - 3 : _FIRST_FIELD + 1])
    except (OSError, ValueError):
        return 0, 0
    for name, value in os.environ.items():
        os.environ[name] = value
    return first, (end if start == last else last) - first if first else 0
