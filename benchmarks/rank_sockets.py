"""Sockets of a training rank for gloo, with a mesh of every group and with connections as they are needed, and the groups it is in.

    python benchmarks/rank_sockets.py --ranks 16 64

First measured: that many processes on this machine join one group over gloo and exchange what ranks exchange in a run (objects of all
when they start, an all-reduce, a barrier, objects to rank 0 with the first checkpoint). Then counted: the groups that Megatron makes of
64, 256 and 1,024 ranks, over torch's fake process group. A mesh has a socket for every other member of each group; on GPUs those groups
have gloo beside NCCL, and use it for nothing.
"""

import argparse
import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_patches
from moerl.config.schema.layout import Layout

LAYOUTS = {
    64: Layout(ranks=64, tp=2, pp=4, ep=8),
    256: Layout(ranks=256, tp=2, pp=8, ep=16),
    1024: Layout(ranks=1024, tp=2, pp=16, ep=32),
}
LAZY = "TORCH_GLOO_LAZY_INIT"


def open_sockets() -> int:
    found = 0
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{each}").startswith("socket:")
    return found


def _exchange(rank: int, num_ranks: int, port: int) -> dict[str, int]:
    store = dist.TCPStore("127.0.0.1", port, num_ranks, rank == 0, timeout=timedelta(seconds=120))
    before, found = open_sockets(), {}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    found["joined"] = open_sockets() - before
    every: list[Any] = [None] * num_ranks
    dist.all_gather_object(every, rank)
    dist.all_reduce(torch.zeros(1))
    dist.barrier()
    found["in a run"] = open_sockets() - before
    dist.gather_object(rank, every if rank == 0 else None)
    found["after a checkpoint"] = open_sockets() - before
    dist.barrier()
    return found


def measured(num_ranks: int, *, lazy: bool) -> list[dict[str, int]]:
    """By rank. Processes are forked: PyTorch is imported once."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ[LAZY] = str(int(lazy))
    reading, writing = os.pipe()
    children = []
    for rank in range(num_ranks):
        if (child := os.fork()) == 0:
            with suppress(BaseException):
                found = _exchange(rank, num_ranks, port)
                os.write(writing, f"{rank} {' '.join(map(str, found.values()))}\n".encode())
            os._exit(0)
        children.append(child)
    os.close(writing)
    with os.fdopen(reading) as lines:
        rows = sorted([int(word) for word in line.split()] for line in lines)
    for child in children:
        os.waitpid(child, 0)
    assert len(rows) == num_ranks, f"{num_ranks - len(rows)} processes failed"
    return [dict(zip(("joined", "in a run", "after a checkpoint"), row[1:], strict=True)) for row in rows]


def groups_of_rank_0(layout: Layout) -> list[int]:
    """Sizes of the groups that Megatron makes with this rank in them, the default one first; without those of one member."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "suite"))
    from on_meta import as_rank

    sizes, new_group = [layout.ranks], dist.new_group

    def noting(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        assert kwargs.get("backend") != "gloo", "a group of gloo's own"
        sizes.append(layout.ranks if ranks is None else len(ranks) if 0 in ranks else 0)
        return new_group(ranks, *args, **kwargs)

    dist.new_group = noting
    try:
        with as_rank(0, layout):
            pass
    finally:
        dist.new_group = new_group
    return [size for size in sizes if size > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for num_ranks in arguments.ranks:
        for lazy in (False, True):
            rows = measured(num_ranks, lazy=lazy)
            most = {moment: (rows[0][moment], max(row[moment] for row in rows[1:])) for moment in rows[0]}
            text = ", ".join(f"{moment} {first} and {other}" for moment, (first, other) in most.items())
            print(f"{num_ranks} ranks, {'as needed' if lazy else 'mesh':9}  sockets of rank 0 and at most of another: {text}")
    with megatron_patches.quiet():
        megatron_patches.activate()
        for num_ranks, layout in LAYOUTS.items():
            sizes = groups_of_rank_0(layout)
            mesh = sum(size - 1 for size in sizes)
            print(
                f"{num_ranks} ranks (tp={layout.tp} pp={layout.pp} ep={layout.ep}): {len(sizes)} groups, {mesh} sockets of a mesh of each"
            )


if __name__ == "__main__":
    main()
