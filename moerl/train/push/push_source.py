"""The training ranks as the source of a weight push: every rank sends what the plan says, and none waits for another."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moerl.cluster.run_secret import RunSecret
from moerl.config.schema.rollout_config import WeightsConfig
from moerl.types.push import Transport
from moerl.weights.plan.buckets import Job, relayed
from moerl.weights.plan.run_plan import Outline

AllRanks = Callable[..., Awaitable[list[Any]]]
"""(verb, *args): what the verb of every worker returns."""
OneRank = Callable[..., Awaitable[Any]]
"""(rank, verb, *args)"""


class MegatronSource:
    """Implements weights.sync.WeightSource over the verbs of TrainWorker."""

    def __init__(self, weights: WeightsConfig, *, directory: Path, all_ranks: AllRanks, one_rank: OneRank, shares_gpus: bool = False):
        """`directory`: of the files of weights.transport=disk. `shares_gpus`: with servers, so that NCCL, which wants a GPU for each
        process of a group, cannot join them, and nccl goes through host memory."""
        self._weights, self._directory, self._shares_gpus = weights, directory, shares_gpus
        self._all_ranks, self._one_rank = all_ranks, one_rank
        self._senders: list[int] = []
        self._members: list[int] = []
        """Ranks that send or relay."""

    async def outline(self) -> Outline:
        outline: Outline = await self._one_rank(0, "outline_push", self._weights.bucket_bytes)
        return outline

    async def listen(self, transport: Transport, jobs: Mapping[int, Job], seconds: float, secret: RunSecret) -> str:
        others = relayed(jobs)
        before, self._members, self._senders = self._members, sorted({*jobs, *others}), sorted(jobs)
        on_gpu = transport in ("ipc", "relay") or not self._shares_gpus
        same = (self._members, seconds, secret, self._weights, self._directory, on_gpu)
        ranks = sorted({*before, *self._members})
        calls = [self._one_rank(rank, "listen", transport, jobs.get(rank, ()), others.get(rank, ()), *same) for rank in ranks]
        addresses: list[str] = await asyncio.gather(*calls)
        return next(address for rank, address in zip(ranks, addresses, strict=True) if rank == self._members[0])

    async def connect(self, address: str, num_readers: int) -> None:
        await asyncio.gather(*(self._one_rank(rank, "connect", address, num_readers) for rank in self._members))

    async def digests(self) -> Mapping[int, Sequence[str]]:
        found = await self._all_ranks("digest_push")
        return {rank: found[rank] for rank in self._senders}

    async def send(self) -> int:
        return sum(await self._all_ranks("send_push"))

    async def finish(self) -> None:
        await self._all_ranks("finish_push")
