"""Record of what a process does now, in a memory file that others can read while it hangs, and that is gone when it ends.

A record has lines of one form: when it was written, two numbers, a text. Writing one is a copy of 128 bytes, so a rank can do it at every
collective. Lines are not written atomically: a reader looks at processes that stand still.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass

from moerl.hangs.python_stacks import memory_file

MEMORY_FILE = "moerl-progress"
_LINE = struct.Struct("<dqq104s")
NUM_LINES = 64
"""One memory page of 4096 bytes holds 32."""
MAX_TEXT = 104

WORK, BESIDE, MICRO_BATCH, COLLECTIVE, WAIT, FIRST_GROUP = range(6)
"""Lines of a training rank: its call, the call of its other thread, the micro-batch, the newest collective, a wait for one that was only
begun; then one per group of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """WORK, BESIDE, COLLECTIVE, WAIT: `first` 1 inside of it and 0 after it. COLLECTIVE: `second` the line of its group, 0 for one
    between two ranks. A group: `first` collectives were entered. MICRO_BATCH: `first` of `second`."""

    written: float
    """By the monotonic clock of its node, which all of its processes share."""
    first: int
    second: int
    text: str


class ProgressRecord:
    """The writer's side; one thread writes a line."""

    def __init__(self) -> None:
        descriptor = os.memfd_create(MEMORY_FILE)
        os.ftruncate(descriptor, NUM_LINES * _LINE.size)
        self._memory = mmap.mmap(descriptor, NUM_LINES * _LINE.size)
        # Stays open: readers find the file by the descriptor.

    def write(self, line: int, first: int, second: int, text: bytes) -> None:
        _LINE.pack_into(self._memory, line * _LINE.size, time.monotonic(), first, second, text)


def read_progress(pid: int) -> dict[int, Line]:
    """The lines that were written; none if the process has no record, or is gone."""
    file = memory_file(pid, MEMORY_FILE)
    try:
        contents = b"" if file is None else file.read_bytes()
    except OSError:
        contents = b""
    lines = enumerate(_LINE.iter_unpack(contents))
    return {
        index: Line(written=written, first=first, second=second, text=text.rstrip(b"\0").decode(errors="replace"))
        for index, (written, first, second, text) in lines
        if written
    }
