"""What ranks exchange for the tests of all-to-alls through memory; rank 0's value goes to the test."""

import gc
import os
import resource
import signal
import time
from datetime import timedelta
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from progress_jobs import open_record

from megatron_patches import shared_exchange
from moerl.hangs.progress import COLLECTIVE, FIRST_GROUP, read_progress

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def is_through_memory() -> bool:
    return any(name.startswith("/memfd:moerl-exchange") for name in _open_files())


def exchange_many(seed: int, num_exchanges: int, lacking: tuple[int, str] | None = None) -> tuple[bool, list[torch.Tensor]]:
    """Whether they went through memory, and all that every rank received, of exchanges of random sizes, many of them nothing.
    `lacking`: a rank, and what it cannot do: "reach" what others have, as on another host, or open more "files"."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if lacking == (rank, "reach"):
        os.open = _not_elsewhere
    elif lacking == (rank, "files"):
        most = len(_open_files()) + 4  # two buffers and one pipe, where two are needed
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    random, generator, received = Random(seed), torch.Generator().manual_seed(seed * 100 + rank), []
    for _ in range(num_exchanges):
        dtype, width, most = random.choice(DTYPES), random.choice([(), (3,), (2, 5)]), random.choice([0, 2, 50, 3000])
        rows = [[random.choice([0, random.randint(0, most)]) for _ in range(size)] for _ in range(size)]
        if random.random() < 0.3:
            rows = [[most] * size] * size
        mine, coming = rows[rank], [theirs[rank] for theirs in rows]
        values = torch.randint(0, 2, (sum(mine), *width), generator=generator).to(dtype)
        output = torch.full((sum(coming), *width), 0, dtype=dtype)
        even = rows[0] == [most] * size and all(theirs == rows[0] for theirs in rows)
        dist.all_to_all_single(output, values, *((None, None) if even else (coming, mine)))
        received.append(output)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, received)
    return is_through_memory(), [tensor for tensors in gathered for tensor in tensors]


def exchange_slowly(seconds: float) -> list[int]:
    """What rank 0 received while the last rank read late: a buffer is not written before all have read it."""
    size, seen = dist.get_world_size(), []
    for number in range(8):
        values, output = torch.full((size,), number), torch.empty(size, dtype=torch.int64)
        if dist.get_rank() == number % size:
            time.sleep(seconds)
        dist.all_to_all_single(output, values)
        seen += output.tolist()
    return seen


def refused_sizes() -> tuple[bool, list[str]]:
    """Whether exchanges go through memory, and kinds of errors for sizes that are not those of the tensors. Nothing is sent for them."""
    kinds = []
    for sent, received in (([1, 1], [2, 2]), ([2, 2], [1, 1]), ([4], [2, 2]), ([2, 2], [2, 1, 1])):
        try:
            dist.all_to_all_single(torch.empty(4), torch.ones(4), received, sent)
        except RuntimeError as error:
            kinds.append(type(error).__name__)
    output = torch.empty(2)
    dist.all_to_all_single(output, torch.full((2,), float(dist.get_rank())))
    assert output.tolist() == [0.0, 1.0]
    return is_through_memory(), kinds


def lose_a_rank(store: str, ends: bool, timeout_seconds: float) -> str:
    """The error of a rank whose only other one leaves after an exchange, by its end or by doing something else. A job of one rank, which
    forks the other: the ranks of a case are all ended with the first."""
    dist.destroy_process_group()
    other = os.fork()
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(other == 0), world_size=2, timeout=timeout)
    dist.all_to_all_single(torch.empty(2), torch.ones(2))
    if other == 0 and ends:
        os._exit(0)
    if other == 0:
        time.sleep(60)
    error = ""
    try:
        for _ in range(2):  # the first may still be written to the pipe, before the other one has ended
            dist.all_to_all_single(torch.empty(2), torch.ones(2))
    except (RuntimeError, OSError) as raised:
        error = str(raised)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}-alone", rank=0, world_size=1)
    return error


def files_of_a_destroyed_group() -> tuple[int, int]:
    """Buffers that the first exchange of a group opened, and files of any kind that its end left open."""
    dist.all_to_all_single(torch.empty(2), torch.ones(2))  # of another group, which stays
    before = _open_files()
    group = dist.new_group([0, 1])
    dist.all_to_all_single(torch.empty(2), torch.ones(2), group=group)
    opened = {name for name in _open_files() if name.startswith("/memfd:moerl-exchange")} - set(before)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return len(opened), len(_open_files()) - len(before)


def exchange_while_ended() -> tuple[bool, str, list[float]]:
    """Whether exchanges go through memory, the error of one while the trainer sleeps without groups, and what one brings after that."""
    from moerl.train.megatron.process_groups import ReloadableGroups
    from moerl.types.errors import ResidencyError

    groups, sent = ReloadableGroups(), torch.full((2,), float(dist.get_rank()))
    with groups.recording():
        group = dist.new_group([0, 1])
    dist.all_to_all_single(torch.empty(2), sent, group=group)
    groups.end()
    error, output = "", torch.empty(2)
    try:
        dist.all_to_all_single(output, sent, group=group)
    except ResidencyError as raised:
        error = str(raised)
    groups.make_again()
    dist.all_to_all_single(output, sent, group=group)
    return is_through_memory(), error, output.tolist()


def recorded_exchanges() -> tuple[bool, str, list[int]]:
    """Whether exchanges went through memory, the newest collective of the rank's record, and the counts of its groups."""
    open_record()
    assert shared_exchange.active()
    for _ in range(3):
        dist.all_to_all_single(torch.empty(2), torch.ones(2))
    lines = read_progress(os.getpid())
    return is_through_memory(), lines[COLLECTIVE].text, [line.first for index, line in lines.items() if index >= FIRST_GROUP]


def _open_files() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue  # the listing's own
    return names


def _not_elsewhere(path: str, *_: Any) -> int:
    raise FileNotFoundError(path)
