"""Ranks for the test of a real measurement: processes on gloo, of which some answer late in proportion to what they send."""

import multiprocessing as mp
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from moerl.doctor.checks.slow_nodes import Measured
from moerl.doctor.measure_bandwidth import MEASURED, Group, _send_and_receive, measure

NUM_BYTES = 2**20
SLOW_SECONDS = 0.15
"""What a slow rank adds to every exchange; a healthy one takes about 2 ms."""


def late(peer: int, out: torch.Tensor, into: torch.Tensor, group: Group) -> None:
    time.sleep(SLOW_SECONDS)
    _send_and_receive(peer, out, into, group)


def run(rank: int, port: int, nodes: list[list[int]], slow: set[int], results) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=sum(map(len, nodes)), timeout=timeout)
    met: dict[int, list[int]] = {}

    def exchange(peer: int, out: torch.Tensor, into: torch.Tensor, group: Group) -> None:
        met[peer] = dist.get_process_group_ranks(group)
        (late if rank in slow else _send_and_receive)(peer, out, into, group)

    found = measure(nodes, torch.device("cpu"), NUM_BYTES, exchange)
    results.put((rank, (MEASURED.dump_json(found), met)))
    dist.barrier()
    dist.destroy_process_group()


def measured(nodes: list[list[int]], slow: set[int]) -> tuple[list[list[Measured]], dict[int, dict[int, list[int]]]]:
    """What every rank measured, node by node; and rank -> peer -> the ranks of the group in which they met."""
    # Torch is imported once, not by every rank.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["moerl.doctor.measure_bandwidth"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    ranks = [rank for node in nodes for rank in node]
    processes = [context.Process(target=run, args=(rank, store.port, nodes, slow, results)) for rank in ranks]
    try:
        for process in processes:
            process.start()
        found = dict(results.get(timeout=90) for _ in ranks)
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [[MEASURED.validate_json(found[rank][0]) for rank in node] for node in nodes], {rank: met for rank, (_, met) in found.items()}
