"""Runs a job on gloo ranks, one process each, forked from one process that has Megatron loaded: a case costs a second, not eight.

The test process itself is never patched, because the patches replace torch.cuda for good. A rank's error reaches the test with
its traceback. Whatever happens, the processes of a case are gone when `run_ranks` returns.
"""

import atexit
import functools
import gc
import importlib
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

DEADLINE_SECONDS = 90.0
_SPARE_SECONDS = 30.0
"""What the serving process may need beyond a case's deadline: it loads Megatron before the first one."""

Job = Callable[..., Any]
"""A function of engine_jobs; it runs on every rank, with the default process group made and the patches active."""


class RankError(Exception):
    """A rank failed, died or was late; its traceback, as far as it had one."""


def run_ranks(
    job: Job, num_ranks: int, *args: Any, without: Sequence[str] = (), imports: str = "", deadline_seconds: float = DEADLINE_SECONDS
) -> Any:
    """What `job(*args)` returned on rank 0. `without`: names of patches that are left out. `imports`: a module that every rank of this
    case and of later ones has. Raises RankError."""
    server = _server()
    try:
        succeeded, value = server.ask((imports, job, num_ranks, args, tuple(without), deadline_seconds), deadline_seconds + _SPARE_SECONDS)
    except BaseException:
        server.close()
        _server.cache_clear()
        raise
    if not succeeded:
        raise RankError(value)
    return pickle.loads(value)


@functools.cache
def _server() -> "_Server":
    server = _Server()
    atexit.register(server.close)
    return server


class _Server:
    """The process that forks ranks. It has a session of its own; each rank has a process group, with whatever Megatron starts there."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(other_end,), name="engine-ranks")
        self._process.start()
        other_end.close()

    def ask(self, request: Any, seconds: float) -> tuple[bool, Any]:
        self._connection.send(request)
        if not self._connection.poll(seconds):
            raise RankError(f"no answer for {seconds:.0f} seconds")
        return self._connection.recv()

    def close(self) -> None:
        """Ends the process, which ends the ranks it may have."""
        self._process.terminate()
        self._process.join(_SPARE_SECONDS)
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection) -> None:
    # Not the terminal's: Ctrl-C is for the test process, which then ends this one.
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    import torch

    import megatron_patches

    warnings.simplefilter("ignore")  # Megatron warns about CUDA by the page, which would bury an error
    torch.set_num_threads(1)
    # These two must precede the import of Megatron. Each rank applies the others, so that a case can leave one out.
    for patch in (megatron_patches.cuda_stand_in, megatron_patches.reference_te):
        patch.apply()
    # In every rank they would be imported anew; dynamo by the optimizer, on its first use.
    for name in ("moerl.train.megatron_engine", "moerl.train.megatron.megatron_model", "torch._dynamo"):
        importlib.import_module(name)

    gc.freeze()
    while True:
        try:
            imports, *request = connection.recv()
        except EOFError:
            return
        if imports:
            importlib.import_module(imports)
        connection.send(_run_case(*request))


def _run_case(job: Job, num_ranks: int, args: Any, without: Sequence[str], seconds: float) -> tuple[bool, Any]:
    """(True, rank 0's value pickled), or (False, what the first rank that failed said)."""
    context = mp.get_context("fork")
    ranks, connections = [], []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for rank in range(num_ranks):
                mine, other_end = context.Pipe(duplex=False)
                place = (rank, num_ranks, Path(directory) / "store", seconds)
                ranks.append(context.Process(target=_rank, args=(place, job, args, without, other_end)))
                ranks[-1].start()
                os.setpgid(ranks[-1].pid, ranks[-1].pid)
                other_end.close()
                connections.append(mine)
            return _first_failure_or_value(connections, monotonic() + seconds)
        finally:
            for process in ranks:
                _end(process)


def _end(process: Any) -> None:
    """With its group: saving a checkpoint starts a process that would outlive a killed rank."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _first_failure_or_value(connections: list[Connection], end: float) -> tuple[bool, Any]:
    """The first failure in time is the cause of the others: the rest only lost a peer."""
    silent, value = dict(zip(connections, range(len(connections)), strict=True)), None
    while silent:
        ready = wait(list(silent), timeout=max(end - monotonic(), 0))
        if not ready:
            return False, f"ranks {sorted(silent.values())} did not finish in time"
        for connection in ready:
            rank = silent.pop(connection)
            try:
                failure, answer = connection.recv()
            except EOFError:
                return False, f"rank {rank} died without a word"
            if failure:
                return False, f"rank {rank}:\n{failure}"
            value = answer if rank == 0 else value
    return True, value


def _rank(place: tuple[int, int, Path, float], job: Job, args: Any, without: Sequence[str], connection: Connection) -> None:
    import torch.distributed as dist

    import megatron_patches

    rank, num_ranks, store, seconds = place
    try:
        megatron_patches.PATCHES = tuple(patch for patch in megatron_patches.PATCHES if patch.NAME not in without)
        megatron_patches.activate()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=seconds))
        value = job(*args)
        # No rank leaves while another may still talk to it.
        dist.barrier()
        # As plain bytes: the pickles that processes exchange by default leave a tensor's memory with the sender, which ends.
        connection.send(("", pickle.dumps(value if rank == 0 else None)))
    except BaseException:
        connection.send((traceback.format_exc(), None))
