"""Measures links between ranks: every pair of a node's ranks, every pair of nodes, and the all-reduce of all. Each rank is a process of
its own: python -m moerl.doctor.measure_bandwidth < JSON."""

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from moerl.cluster.run_secret import RunSecret
from moerl.cluster.secret_store import SecretStore
from moerl.doctor.checks.slow_nodes import Measured, rounds

_REPEATS = 5

Group = dist.ProcessGroup | None
"""None: of all ranks."""

Exchange = Callable[[int, torch.Tensor, torch.Tensor, Group], None]
"""(peer, what is sent, what is received, group that both are in): returns when both are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankJob:
    host: str
    """Address of the head's store."""
    port: int
    secret: str = field(repr=False)
    """Key of the RunSecret that the store asks for."""
    rank: int
    nodes: tuple[tuple[int, ...], ...]
    """The ranks of every node."""
    gpu: int | None
    """None: the ranks are on CPU cores."""
    num_bytes: int
    seconds: float


JOB, MEASURED = TypeAdapter(RankJob), TypeAdapter(Measured)


def main(job: RankJob) -> None:
    """Puts what it measured under measured/RANK in the store, or its traceback under failed/RANK."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=job.seconds)
    store = SecretStore.join(job.host, job.port, RunSecret(key=job.secret), job.seconds)
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


def measure(nodes: Sequence[Sequence[int]], device: torch.device, num_bytes: int, exchange: Exchange | None = None) -> Measured:
    """`nodes`: the ranks of every node, as many on each. The default process group is made. `exchange`: of this rank, by default a send and
    a receive at once.

    Ranks of a node meet in a group of their own: NCCL gives every peer of a communicator as many channels as the peer with the fewest gets,
    which over the network are few (ncclTopoComputeP2pChannels, src/graph/paths.cc).
    """
    exchange = _send_and_receive if exchange is None else exchange
    node = next(index for index, ranks in enumerate(nodes) if dist.get_rank() in ranks)
    local = nodes[node].index(dist.get_rank())
    buffers = (torch.zeros(num_bytes, dtype=torch.uint8, device=device), torch.zeros(num_bytes, dtype=torch.uint8, device=device))
    groups: list[Group] = [dist.new_group(list(ranks)) if len(nodes) > 1 else None for ranks in nodes]
    # NCCL makes a group's communicator with its first operation, in which all must take part; with an odd number, a round leaves one out.
    _wait_for_all(device, groups[node])
    locals_ = _meet_everyone(local, nodes[node], groups[node], buffers, exchange)
    remotes = _meet_everyone(node, [ranks[local] for ranks in nodes], None, buffers, exchange)
    inside = _all_reduce(buffers[0], groups[node]) if len(nodes) > 1 and len(nodes[node]) > 1 else None
    together = _all_reduce(buffers[0], None) if dist.get_world_size() > 1 else None
    return Measured(local=locals_, remote=remotes, node_all_reduce=inside, all_reduce=together)


def _meet_everyone(
    me: int, ranks: Sequence[int], group: Group, buffers: tuple[torch.Tensor, torch.Tensor], exchange: Exchange
) -> dict[int, float]:
    """Position in `ranks` -> bandwidth, for all but `me`. All rounds begin together, also on ranks that have no peer in one."""
    out, into = buffers
    found = {}
    for pairs in rounds(len(ranks)):
        _wait_for_all(out.device)
        peer = next((a + b - me for a, b in pairs if me in (a, b)), None)
        if peer is not None:
            found[peer] = out.numel() / _seconds(partial(exchange, ranks[peer], out, into, group), out.device) / 1e9
    return found


def _send_and_receive(peer: int, out: torch.Tensor, into: torch.Tensor, group: Group) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, peer, group), dist.P2POp(dist.irecv, into, peer, group)]):
        work.wait()


def _all_reduce(tensor: torch.Tensor, group: Group) -> float:
    """Bus bandwidth: what each rank must send and receive at least, 2 (n - 1) / n times the tensor, per second."""
    _wait_for_all(tensor.device)
    num = dist.get_world_size(group)
    summed = tensor.view(torch.float32)
    seconds = _seconds(lambda: dist.all_reduce(summed, group=group), tensor.device)
    return 2 * (num - 1) / num * tensor.numel() / seconds / 1e9


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median; the first time, which opens connections, does not count."""
    taken = []
    for _ in range(_REPEATS + 1):
        _finish(device)
        begin = time.perf_counter()
        call()
        _finish(device)
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


def _wait_for_all(device: torch.device, group: Group = None) -> None:
    dist.barrier(group, device_ids=[device.index] if device.type == "cuda" else None)
    _finish(device)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(JOB.validate_json(sys.stdin.buffer.read()))
