"""Jobs of ranks that keep a record of what they do, as every rank of a run."""

import os
from contextlib import suppress
from typing import Any

import engine_jobs
import torch
import torch.distributed as dist

from moerl.hangs.progress import COLLECTIVE, read_progress
from moerl.train.rank_progress import open_record


def exchange() -> list[float]:
    """What both neighbours' sends brought, batched and not."""
    open_record()
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    batched, single = torch.empty(1), torch.empty(1)
    sent = torch.full((1,), float(rank))
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, batched, peer)]):
        work.wait()
    works = [dist.isend(sent, peer), dist.irecv(single, peer)]
    for work in works:
        work.wait()
    return [batched.item(), single.item()]


def first_step(*args: Any) -> Any:
    open_record()
    return engine_jobs.first_step(*args)


def refused() -> tuple[str, int, int]:
    """The record after a collective that raised: its name, whether the rank is in it, and how many its group has had."""
    open_record()
    with suppress(TypeError):
        dist.all_reduce("no tensor")
    lines = read_progress(os.getpid())
    return lines[COLLECTIVE].text, lines[COLLECTIVE].first, lines[lines[COLLECTIVE].second].first
