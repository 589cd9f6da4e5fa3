"""Runs a job on ranks that have a GPU each, or on CPU as a rank without one does: the same processes, so that CPU shows that jobs run."""

import importlib
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_SECONDS = 300


def run(job: str, num_ranks: int, *args: Any, reference_te: bool = False) -> Any:
    """What "module:function"(*args) returned on rank 0. A module of jobs imports Megatron, which the patches of a rank must precede."""
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_rank, args=(num_ranks, Path(directory), job, args, reference_te), nprocs=num_ranks)
        return torch.load(Path(directory) / "answer", weights_only=False)


def _rank(rank: int, num_ranks: int, directory: Path, job: str, args: Any, reference_te: bool) -> None:
    import megatron_patches

    torch.set_num_threads(1)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    megatron_patches.activate(with_reference=reference_te)
    module, _, function = job.partition(":")
    timeout = timedelta(seconds=_SECONDS)
    dist.init_process_group(backend, init_method=f"file://{directory / 'store'}", rank=rank, world_size=num_ranks, timeout=timeout)
    answer = getattr(importlib.import_module(module), function)(*args)
    if rank == 0:
        torch.save(answer, directory / "answer")
    dist.barrier()
    dist.destroy_process_group()
