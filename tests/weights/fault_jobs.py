"""Pushes from two expert-parallel trainer ranks to a real server, with faults injected between the ranks' parameters and the server's."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moerl.config.schema import WeightsConfig
from moerl.push_types import Bucket, Manifest, Origin, Transport
from moerl.rollout.http_engine import HTTPEngine
from moerl.train.settings import EngineSettings
from moerl.types import TrainBatch, WeightError
from moerl.weights.canary import run_canary
from moerl.weights.digest import tensor_digest
from moerl.weights.sync import WeightSync

Tensors = dict[str, torch.Tensor]
Fault = Callable[[Tensors, Tensors], Tensors]
"""(what the export gives, what it gave for the version before) -> what it gives instead."""

PROMPTS = ((1, 2, 3), (4,), (5, 6))


class Ranks:
    """Rank 0's view of all: a WeightSource over the verbs of real training workers, and a log-prob function."""

    def __init__(self, worker: Any):
        self.worker = worker
        self.last: Tensors = {}
        self.fault: Fault = lambda tensors, last: tensors

    def everywhere(self, verb: str, *arguments: Any) -> None:
        """The other ranks run it; so must this one."""
        dist.broadcast_object_list([(verb, arguments)], src=0)

    def change_weights(self) -> None:
        self.everywhere("change_weights")
        change_weights(self.worker)

    async def logprobs(self, batch: TrainBatch) -> np.ndarray:
        self.everywhere("logprobs", batch, False)
        return self.worker._engine.logprobs(batch)

    async def manifest(self, version: int) -> Manifest:
        self.everywhere("manifest", version)
        return self.worker.manifest(version)

    async def listen(self, transport: Transport, num_receivers: int) -> str:
        return self.worker.listen(transport, num_receivers, WeightsConfig(bucket_bytes=2**14), "127.0.0.1", Path())

    async def connect(self) -> None:
        await asyncio.to_thread(self.worker.connect)

    async def next_bucket(self, index: int) -> Bucket | None:
        if index == 0:
            self.everywhere("join_export")
        return self.worker.next_bucket(index)

    async def transmit(self, bucket: Bucket) -> None:
        await asyncio.to_thread(self.worker.transmit, bucket)

    async def abandon(self) -> None:
        self.worker.drop_export()

    def inject_into_export(self) -> None:
        """What the export gives passes `fault` before it is packed."""
        export = self.worker._engine.export

        def damaged(**options: Any) -> Iterator[tuple[str, torch.Tensor]]:
            tensors = dict(export(**options))
            self.last, last = {name: tensor.clone() for name, tensor in tensors.items()}, self.last
            yield from self.fault(tensors, last).items()

        self.worker._engine.export = damaged


def change_weights(worker: Any) -> None:
    """As an update would, and equally on ranks that hold the same."""
    with torch.no_grad():
        for number, tensor in enumerate(worker._engine.model.bridge.tensors()):
            tensor.mul_(1 + 0.001 * (number + 1))


def new_worker(settings: EngineSettings) -> Any:
    from engine_jobs import new_engine

    from moerl.train.worker import TrainWorker

    worker = TrainWorker(dist.get_rank(), dist.get_world_size())
    worker._engine = new_engine(settings)
    return worker


def follow(worker: Any) -> None:
    """Ranks other than 0: run what rank 0 asks for until it says "end"."""
    while True:
        message: list[Any] = [None]
        dist.broadcast_object_list(message, src=0)
        verb, arguments = message[0]
        if verb == "end":
            return
        if verb == "change_weights":
            change_weights(worker)
        else:
            getattr(worker, verb)(*arguments)


def faults_of_pushes(
    settings: EngineSettings, exported: dict[str, Fault], served: dict[str, str], hidden: str, command: Sequence[str], fault_file: Path
) -> dict[str, str]:
    """What a push says with each fault, on rank 0; "" if it succeeds. `exported`: faults of the trainer's export; `served`: of the server.

    "hidden": with the tensor `hidden` left out of names, origins and export. "none": without any fault.
    """
    worker = new_worker(settings)
    if dist.get_rank() != 0:
        follow(worker)
        return {}
    ranks = Ranks(worker)
    ranks.inject_into_export()
    found = asyncio.run(_push_all(ranks, exported, served, hidden, command, fault_file))
    ranks.everywhere("end")
    return found


async def _push_all(
    ranks: Ranks, exported: dict[str, Fault], served: dict[str, str], hidden: str, command: Sequence[str], fault_file: Path
) -> dict[str, str]:
    engine = HTTPEngine(command, host="127.0.0.1", port=0, log_path=fault_file.with_suffix(".log"), start_seconds=60)
    found = {}
    try:
        await engine.start()
        case = _Pushes(ranks, engine, fault_file)
        for name, fault in exported.items():
            ranks.fault = fault
            found[name] = await case.with_fault()
        for name, text in served.items():
            fault_file.write_text(text)  # noqa: ASYNC240  # nothing else runs meanwhile
            found[name] = await case.with_fault()
        bridge = ranks.worker._engine.model.bridge
        names, originals = bridge.names, bridge.originals
        bridge.names = lambda **options: [name for name in names(**options) if name != hidden]
        bridge.originals = lambda dtype: (item for item in originals(dtype) if item[0] != hidden)
        ranks.fault = lambda tensors, last: {name: tensor for name, tensor in tensors.items() if name != hidden}
        found["hidden"] = await case.with_fault(lambda: bridge.__dict__.update(names=names, originals=originals))
        found["none"] = await case.with_fault()
    finally:
        await engine.close()
    return found


class _Pushes:
    def __init__(self, ranks: Ranks, engine: HTTPEngine, fault_file: Path):
        self._ranks, self._engine, self._fault_file, self._version = ranks, engine, fault_file, 0
        self._sync = WeightSync(ranks, {engine.name: engine.receiver()}, transport="shm", settle_seconds=25)

    async def with_fault(self, mend: Callable[[], object] = lambda: None) -> str:
        """What the next push, or its canary, says; then the fault is mended, and a push of changed weights must succeed."""
        message = ""
        try:
            await self._push()
        except WeightError as error:
            message = str(error)
        self._ranks.fault = lambda tensors, last: tensors
        self._fault_file.write_text("none")
        mend()
        await self._push()
        return message

    async def _push(self) -> None:
        self._version += 1
        self._ranks.change_weights()
        await self._sync.push(self._version)
        await self._canary()

    def _canary(self) -> Awaitable[object]:
        version = self._version
        return run_canary([self._engine], self._ranks.logprobs, PROMPTS, max_tokens=6, limit=1e-4, version=version)


def origins_and_exported_digests(settings: EngineSettings) -> tuple[dict[str, Origin], dict[str, str]]:
    from engine_jobs import new_engine

    engine = new_engine(settings)
    origins = engine.origins()
    return origins, {name: tensor_digest(tensor) for name, tensor in engine.export(with_mtp=False)}
