"""One all-to-all among ranks of this host: gloo's over TCP against the one through memory that they share, in turns.

    python benchmarks/exchange.py --ranks 2 4 --kilobytes 16 128 1024 8192

Each rank is a process with one thread and sends to every one an equal part of its bytes. It needs a free core for each rank.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_patches import shared_exchange


def run_rank(rank: int, num_ranks: int, store: Path, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    gloo = dist.all_to_all_single
    shared_exchange.apply()
    ways = {"gloo": gloo, "shared memory": dist.all_to_all_single}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    for kilobytes in options.kilobytes:
        sent = torch.randn(kilobytes * 256 // num_ranks * num_ranks)
        turns = [{name: seconds_of(partial(way, torch.empty_like(sent), sent), options.calls) for name, way in ways.items()}
                 for _ in range(options.repeats + 1)][1:]  # fmt: skip
        if rank == 0:
            took = {name: 1e6 * median(turn[name] for turn in turns) for name in ways}
            ratio = median(turn["gloo"] / turn["shared memory"] for turn in turns)
            print(f"| {num_ranks} | {kilobytes} KB | {took['gloo']:.0f} | {took['shared memory']:.0f} | {ratio:.1f} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def seconds_of(exchange: Any, num_calls: int) -> float:
    """Seconds of one of these calls."""
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(num_calls):
        exchange()
    return (time.perf_counter() - begun) / num_calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[16, 128, 1024, 8192], help="of a rank, for all others together")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("| ranks | bytes of each | gloo, us | shared memory, us | gloo / shared memory, median of pairs |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(run_rank, (num_ranks, Path(folder) / "store", options), num_ranks, start_method="spawn")


if __name__ == "__main__":
    main()
