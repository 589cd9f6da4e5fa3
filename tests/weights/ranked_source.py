"""A trainer of several ranks as the source of pushes, whose real senders are threads of this process."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import torch

from moerl.cluster.run_secret import RunSecret
from moerl.config.schema.layout import Layout
from moerl.types.push import Transport
from moerl.weights.plan.buckets import Job, relayed
from moerl.weights.plan.run_plan import Outline, RankPlaces
from moerl.weights.plan.spec_tensors import box_of, spec_of
from moerl.weights.plan.tensor_specs import expert_of
from moerl.weights.plan.transfer_plan import PlannedTensor
from moerl.weights.push_calls import in_thread
from moerl.weights.send import WeightSender


class RankedSource:
    """Implements weights.sync.WeightSource. Every second tensor is of the second stage, if there are two."""

    def __init__(
        self, model: Mapping[str, torch.Tensor], layout: Layout, *, bucket_bytes: int, before: Callable[[int], None] | None = None,
        devices: Sequence[torch.device] | None = None,
    ):  # fmt: skip
        """`model` may be changed between pushes. `before`: called ahead of every bucket of rank 0 with its index. `devices`: of every
        rank."""
        self.model, self._layout, self._bucket_bytes, self._before = dict(model), layout, bucket_bytes, before
        self._devices = devices
        self.num_listens = 0
        self.senders: dict[int, WeightSender] = {}
        self._jobs: Mapping[int, Job] = {}

    async def outline(self) -> Outline:
        tensors = [
            PlannedTensor(spec=spec_of(name, tensor), stage=number % self._layout.pp, expert=expert_of(name), cut_dim=None)
            for number, (name, tensor) in enumerate(self.model.items())
        ]
        return Outline(tensors=tensors, layout=self._layout, bucket_bytes=self._bucket_bytes)

    async def listen(self, transport: Transport, jobs: Mapping[int, Job], seconds: float, secret: RunSecret) -> str:
        self.close()
        self.num_listens += 1
        self._jobs, others = jobs, relayed(jobs)
        for rank in sorted({*jobs, *others}):
            device = {} if self._devices is None else {"device": self._devices[rank]}
            self.senders[rank] = WeightSender(
                transport, jobs.get(rank, ()), self._reader(rank), seconds=seconds, secret=secret, rank=rank, relayed=others.get(rank, ()),
                **device,
            )  # fmt: skip
        if self._before is not None:
            pack, before = self.senders[0].pack, self._before
            self.senders[0].pack = lambda index: before(index) or pack(index)  # type: ignore[method-assign,func-returns-value]
        first, *others = self.senders.values()
        for sender in others:
            sender.listen(is_first=False)
        return first.listen(is_first=True)

    async def connect(self, address: str, num_readers: int) -> None:
        members = sorted(self.senders)
        joining = (in_thread(each.connect, address, senders=members, num_readers=num_readers) for each in self.senders.values())
        await asyncio.gather(*joining)

    async def digests(self) -> Mapping[int, Sequence[str]]:
        return {rank: self.senders[rank].digests() for rank in self._jobs}

    async def send(self) -> int:
        """As Ray's calls do, it tells the first failure when all have ended."""
        found = await asyncio.gather(*(in_thread(sender.send) for sender in self.senders.values()), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return 0

    async def finish(self) -> None:
        pass

    def close(self) -> None:
        """Safe to call twice."""
        for sender in self.senders.values():
            sender.close()
        self.senders = {}

    def _reader(self, rank: int) -> Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor]:
        def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
            piece = box_of(self.model[name], start, shape)
            return piece if self._devices is None else piece.to(self._devices[rank])

        return read


def on_two_nodes(servers: Mapping[str, str], num_ranks: int) -> dict[str, object]:
    """`nodes` and `ranks` of a WeightSync: the node, x or y, of each server of one process; the first half of the ranks are on x."""
    half = num_ranks // 2
    places = RankPlaces(nodes=["x"] * half + ["y"] * half, gpus=[*range(half), *range(half)], server_gpus=dict.fromkeys(servers, ()))
    return {"nodes": {name: [node] for name, node in servers.items()}, "ranks": places}
