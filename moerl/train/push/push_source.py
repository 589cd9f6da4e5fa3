"""The training ranks as the source of a weight push, on both sides of their calls: the driver's, which tells each rank what the plan gives
it to send, and a rank's, which sends it and waits for no other.

The driver has no torch: what needs it is imported in the rank's methods.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.cluster.run_secret import RunSecret
from moerl.config.schema.rollout_config import WeightsConfig
from moerl.types.push import Transport
from moerl.weights.plan.buckets import Job, relayed
from moerl.weights.plan.run_plan import Outline

if TYPE_CHECKING:
    from moerl.train.push.pushed_tensors import PushedTensors
    from moerl.weights.send import WeightSender

AllRanks = Callable[..., Awaitable[list[Any]]]
"""(verb, *args): what the verb of every worker returns."""
OneRank = Callable[..., Awaitable[Any]]
"""(rank, verb, *args)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOrder:
    """Order to a rank: what it does in every push from now on."""

    transport: Transport
    job: Job
    """Buckets that it sends."""
    relayed: Job
    """Buckets that it passes on."""
    ranks: tuple[int, ...]
    """Ranks that send or relay, in order."""
    seconds: float
    """How long a call may wait for receivers."""
    secret: RunSecret
    """All sides prove it."""
    disk_delta: bool
    """weights.disk_delta"""
    directory: Path
    """Folder of the files of weights.transport=disk."""
    on_gpu: bool
    """Buckets stay there, if there is one."""


class MegatronSource:
    """Implements weights.sync.WeightSource over the verbs of TrainWorker, which hands them to `RankPush`."""

    def __init__(self, weights: WeightsConfig, *, directory: Path, all_ranks: AllRanks, one_rank: OneRank, shares_gpus: bool = False):
        """`directory`: of the files of weights.transport=disk. `shares_gpus`: with servers, so that NCCL, which wants a GPU for each
        process of a group, cannot join them, and nccl goes through host memory."""
        self._weights, self.directory, self._shares_gpus = weights, directory, shares_gpus
        self._all_ranks, self._one_rank = all_ranks, one_rank
        self._senders: list[int] = []
        self._ranks: tuple[int, ...] = ()

    async def outline(self) -> Outline:
        outline: Outline = await self._one_rank(0, "outline_push", self._weights.bucket_bytes)
        return outline

    async def listen(self, transport: Transport, jobs: Mapping[int, Job], seconds: float, secret: RunSecret) -> str:
        others = relayed(jobs)
        before, self._ranks, self._senders = self._ranks, tuple(sorted({*jobs, *others})), sorted(jobs)
        ranks = sorted({*before, *self._ranks})
        orders = [
            PushOrder(
                transport=transport,
                job=jobs.get(rank, ()),
                relayed=others.get(rank, ()),
                ranks=self._ranks,
                seconds=seconds,
                secret=secret,
                disk_delta=self._weights.disk_delta,
                directory=self.directory,
                on_gpu=transport in ("ipc", "relay") or not self._shares_gpus,
            )
            for rank in ranks
        ]
        calls = [self._one_rank(rank, "listen", order) for rank, order in zip(ranks, orders, strict=True)]
        addresses: list[str] = await asyncio.gather(*calls)
        return next(address for rank, address in zip(ranks, addresses, strict=True) if rank == self._ranks[0])

    async def connect(self, address: str, num_readers: int) -> None:
        await asyncio.gather(*(self._one_rank(rank, "connect", address, num_readers) for rank in self._ranks))

    async def digests(self) -> Mapping[int, Sequence[str]]:
        found = await self._all_ranks("digest_push")
        return {rank: found[rank] for rank in self._senders}

    async def send(self) -> int:
        return sum(await self._all_ranks("send_push"))

    async def finish(self) -> None:
        await self._all_ranks("finish_push")


class RankPush:
    """A rank's side; only `digests` is collective."""

    def __init__(self, tensors: "PushedTensors", pushing: Callable[..., AbstractContextManager[None]], rank: int, host: str):
        """`pushing`: MegatronEngine's, in which the tensors may be read. `host`: the address at which others reach this process."""
        self._tensors, self._pushing, self._rank, self._host = tensors, pushing, rank, host
        self.sender: WeightSender | None = None
        """None: this rank has nothing to do in a push."""
        self._ranks: tuple[int, ...] = ()

    def outline(self, bucket_bytes: int) -> Outline:
        return self._tensors.outline(bucket_bytes)

    def listen(self, order: PushOrder) -> str:
        """The address if it is the first of the ranks."""
        import torch

        from moerl.weights.send import WeightSender

        if self.sender is not None:
            self.sender.close()
        self.sender, self._ranks = None, order.ranks
        if self._rank not in order.ranks:
            return ""
        self.sender = WeightSender(
            order.transport,
            order.job,
            self._tensors.read,
            seconds=order.seconds,
            secret=order.secret,
            rank=self._rank,
            relayed=order.relayed,
            device=torch.device(torch.cuda.current_device() if order.on_gpu else "cpu"),
            host=self._host,
            directory=order.directory / f"rank-{self._rank}",
            delta=order.disk_delta,
        )
        return self.sender.listen(is_first=self._rank == order.ranks[0])

    def connect(self, address: str, num_readers: int) -> None:
        if self.sender is not None:
            self.sender.connect(address, senders=self._ranks, num_readers=num_readers)

    def digests(self) -> list[str]:
        """Begins a push of the present weights. Collective."""
        with self._pushing(begins=True):
            return [] if self.sender is None else self.sender.digests()

    def send(self) -> int:
        """Everything that this rank sends, until it was read; bytes written (weights.transport=disk)."""
        with self._pushing():
            return 0 if self.sender is None else self.sender.send()

    def finish(self) -> None:
        if self.sender is not None:
            self.sender.finish()
        self._tensors.release()
