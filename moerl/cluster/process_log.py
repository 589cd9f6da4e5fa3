"""The log of a process that was started by others: everything it writes, its crash included, in a file of the run."""

import faulthandler
import logging
import os
import sys
import time
from pathlib import Path

from moerl.cluster.descendants import started_at


def process_seconds() -> float:
    """Since this process was started. Before it has done anything else: what its imports and settings took."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_at(os.getpid())


def write_to(path: Path) -> Path:
    """Standard output and error, moerl's logging, and the stacks at a crash go to the end of `path` from here on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable(file=2, all_threads=True)
    handler = logging.StreamHandler(os.fdopen(os.dup(2), "w", buffering=1))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    moerl = logging.getLogger("moerl")
    moerl.handlers = [handler]
    moerl.setLevel(logging.INFO)
    return path
