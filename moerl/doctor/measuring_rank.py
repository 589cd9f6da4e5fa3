"""One rank of the doctor's measurements, as a process of its own: python -m moerl.doctor.measuring_rank JSON."""

import ctypes
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from moerl.doctor.exchange import MEASURED, measure

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RankJob:
    host: str
    """Address of the head's store."""
    port: int
    rank: int
    nodes: tuple[tuple[int, ...], ...]
    """The ranks of every node."""
    gpu: int | None
    """None: the ranks are on CPU cores."""
    num_bytes: int
    seconds: float
    parent: int
    """The process that started it, with which it ends."""


JOB = TypeAdapter(RankJob)


def main(text: str) -> None:
    """Puts what it measured under measured/RANK in the store, or its traceback under failed/RANK."""
    job = JOB.validate_json(text)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job.parent:
        sys.exit("the process that started this rank has ended")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=job.seconds)
    store = dist.TCPStore(job.host, job.port, is_master=False, timeout=timeout)
    try:
        device = torch.device("cpu") if job.gpu is None else torch.device("cuda", job.gpu)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        num_ranks = sum(map(len, job.nodes))
        backend = "gloo" if job.gpu is None else "nccl"
        dist.init_process_group(backend, store=dist.PrefixStore("ranks", store), rank=job.rank, world_size=num_ranks, timeout=timeout)
        store.set(f"measured/{job.rank}", MEASURED.dump_json(measure(job.nodes, device, job.num_bytes)).decode())
    except Exception:
        store.set(f"failed/{job.rank}", traceback.format_exc())
        raise
    # Every rank is done before one ends its connections, which a late one would take for a failure.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
