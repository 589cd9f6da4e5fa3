"""Conversions in processes of their own that are killed at a chosen operation on files.

Operations are what Python reports of files and directories at the target that are opened to be written, renamed, removed or made, and
every write and flush of a file of weights.
"""

import itertools
import multiprocessing
import os
import signal
import sys

import torch

from moerl.convert.conversion import Conversion, convert
from moerl.convert.tensors import writing

_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def kill_at(moment: int, conversion: Conversion) -> bool:
    """Before its `moment`-th operation, counted from 0; whether it lived to its end."""
    process = multiprocessing.get_context("fork").Process(target=_convert_until, args=(moment, conversion))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def count_moments(conversion: Conversion) -> int:
    """Operations of the whole conversion, which is done."""
    reading, writing_end = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_convert_and_count, args=(conversion, writing_end))
    process.start()
    process.join()
    assert process.exitcode == 0
    return reading.recv()


def _convert_until(moment: int, conversion: Conversion) -> None:
    left = itertools.count(moment, -1)

    def before_each() -> None:
        if next(left) <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    _convert(conversion, before_each)


def _convert_and_count(conversion, connection) -> None:
    counted = itertools.count()
    _convert(conversion, lambda: next(counted))
    connection.send(next(counted))


def _convert(conversion, before_each) -> None:
    torch.set_num_threads(1)  # before any operation: the threads of the process it is forked from are not there

    def watched(function):
        def call(*args, **kwargs):
            before_each()
            return function(*args, **kwargs)

        return call

    def hook(event, args):
        only_reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)
        if event in _EVENTS and not only_reads and str(args[0]).startswith(str(conversion.target)):
            before_each()

    os.fsync, writing.Output.write = watched(os.fsync), watched(writing.Output.write)
    sys.addaudithook(hook)
    convert(conversion, dry_run=False)
