"""What ranks read of a checkpoint, and what they find damaged. Every function runs on every rank; rank 0's value goes to the test."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_jobs import files_in, load
from engine_jobs import new_engine

from moerl.train.checkpoint.checkpoint_dirs import FileDigests
from moerl.train.engine_settings import EngineSettings


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def bytes_read() -> int:
    """By this process so far, with every call that reads; sockets are received from, which is none."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


def reads_of(settings: EngineSettings, directory: Path, weights_only: bool) -> tuple[list[int], dict[str, int]]:
    """(bytes that each rank reads while it loads, how often each file is opened by all)."""
    engine, files = new_engine(settings), files_in(directory)
    load(engine, directory, weights_only=weights_only)  # what it imports is read, too
    opened: list[str] = []

    def note(event: str, arguments: Any) -> None:
        if event == "open" and str(arguments[0]).startswith(str(directory)):
            opened.append(Path(arguments[0]).name)

    sys.addaudithook(note)
    before = bytes_read()
    assert engine.shards.load(directory, files, weights_only=weights_only) == []
    count = bytes_read() - before
    every = [name for names in gathered(list(opened)) for name in names]
    return gathered(count), {name: every.count(name) for name in every}


def damaged_files(settings: EngineSettings, directory: Path, files: FileDigests) -> list[tuple[list[str], bool]]:
    """By rank: what loading says is damaged, and whether its random stream is still its own."""
    engine = new_engine(settings)
    before = torch.get_rng_state()
    found = engine.shards.load(directory, files)
    return gathered((found, torch.equal(torch.get_rng_state(), before)))


def peak_of_load(settings: EngineSettings, directory: Path) -> tuple[int, int]:
    """(bytes that the process grew by while it loaded weights a second time, bytes of its largest file). An optimizer's new tensors are
    no part of reading."""
    engine, files = new_engine(settings), files_in(directory)
    load(engine, directory, weights_only=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = _peak()
    assert engine.shards.load(directory, files, weights_only=True) == []
    return _peak() - before, max(size for size, _ in files.values())


def _peak() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
