"""Pushes from two expert-parallel trainer ranks to a real server, with faults injected between the ranks' parameters and the server's."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from push_ranks import Ranks, Tensors, follow, new_worker

from moerl.canary import ask_canary, compare_canary
from moerl.cluster.run_secret import RunSecret
from moerl.config.derive.scratch_config import VOCAB_SIZE
from moerl.rollout.server.client import HTTPEngine
from moerl.rollout.server.spread_process import NodeOfServer
from moerl.train.engine_settings import EngineSettings
from moerl.train.train_worker import TrainWorker
from moerl.types.batch import TrainBatch
from moerl.types.errors import WeightError
from moerl.types.stored import Here
from moerl.weights.plan.spec_tensors import box_of
from moerl.weights.sync import WeightSync

Fault = Callable[[str, Tensors, Tensors], torch.Tensor | None]
"""(name, all tensors, all tensors of the version before) -> what is packed as the tensor; None: nothing, the sender drops it."""

PROMPTS = ((1, 2, 3), (4,), (5, 6))


class FaultyWorker(TrainWorker):
    """What it packs passes `fault` first; what it digests does not."""

    faults: dict[str, Fault] = {}
    fault = ""
    values: Tensors = {}
    last: Tensors = {}

    def _stored(self, values_T: np.ndarray) -> Any:
        return Here(values_T)  # there is no Ray

    def change_weights(self) -> None:
        """As an update would, and equally on ranks that hold the same. Collective."""
        with torch.no_grad():
            for number, tensor in enumerate(self._engine.model.bridge.tensors()):
                tensor.mul_(1 + 0.001 * (number + 1))
        everything = [{name: tensor.clone() for name, tensor in self._engine.export(with_mtp=False)}]
        dist.broadcast_object_list(everything, src=0)
        self.last, self.values = self.values, everything[0]

    def set_fault(self, name: str) -> None:
        self.fault = name

    def hide(self, hidden: str) -> None:
        """A bridge that does not know this tensor; "" brings it back."""
        owned = self._engine.model.bridge.owned()
        owned.__dict__.pop("parts", None)
        parts = owned.parts
        if hidden:
            owned.parts = lambda dtype, **kinds: [part for part in parts(dtype, **kinds) if part.name != hidden]

    def send_push(self) -> int:
        sender = self._push.sender
        assert sender is not None
        read, place = sender._read, sender._place
        sender._read = self._read_with_fault
        sender._place = lambda entry, data: None if self._packed(entry.name) is None else place(entry, data)
        try:
            return super().send_push()
        finally:
            sender._read, sender._place = read, place

    def _packed(self, name: str) -> torch.Tensor | None:
        return self.faults[self.fault](name, self.values, self.last) if self.fault else self.values[name]

    def _read_with_fault(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        packed = self._packed(name)
        return box_of(self.values[name] if packed is None else packed, start, shape)


def faults_of_pushes(
    settings: EngineSettings, exported: dict[str, Fault], served: dict[str, str], hidden: str, command: Sequence[str], fault_file: Path
) -> dict[str, str]:
    """What a push says with each fault, on rank 0; "" if it succeeds. `exported`: faults of the trainer's ranks; `served`: of the server.

    "hidden": with the tensor `hidden` unknown to the trainer. "none": without any fault.
    """
    worker = new_worker(settings, FaultyWorker)
    worker.faults = exported
    if dist.get_rank() != 0:
        follow(worker)
        return {}
    ranks = Ranks(worker)
    found = asyncio.run(_push_all(ranks, exported, served, hidden, command, fault_file))
    dist.broadcast_object_list([(None, "end", ())], src=0)
    return found


async def _push_all(
    ranks: Ranks, exported: dict[str, Fault], served: dict[str, str], hidden: str, command: Sequence[str], fault_file: Path
) -> dict[str, str]:
    nodes, log = [NodeOfServer(command=command)], fault_file.with_suffix(".log")
    engine = HTTPEngine(nodes, secret=RunSecret.new(), port=0, log_path=log, start_seconds=60)
    found = {}
    try:
        await engine.start()
        case = _Pushes(ranks, engine, fault_file)
        for name in exported:
            ranks.ask(None, "set_fault", name)
            found[name] = await case.with_fault()
        for name, text in served.items():
            fault_file.write_text(text)  # noqa: ASYNC240  # nothing else runs meanwhile
            found[name] = await case.with_fault()
        ranks.ask(None, "hide", hidden)
        case.connect_anew()
        found["hidden"] = await case.with_fault()
        found["none"] = await case.with_fault()
    finally:
        await engine.close()
    return found


class _Pushes:
    def __init__(self, ranks: Ranks, engine: HTTPEngine, fault_file: Path):
        self._ranks, self._engine, self._fault_file, self._version = ranks, engine, fault_file, 0
        self.connect_anew()

    def connect_anew(self) -> None:
        receivers = {self._engine.name: self._engine}
        self._sync = WeightSync(self._ranks.source(), receivers, transport="ipc", settle_seconds=25)

    async def with_fault(self) -> str:
        """What the next push, or its canary, says; then the fault is mended, and a push of changed weights must succeed."""
        message = ""
        try:
            await self._push()
        except WeightError as error:
            message = str(error)
        self._ranks.ask(None, "set_fault", "")
        self._ranks.ask(None, "hide", "")
        self._fault_file.write_text("none")
        await self._push()
        return message

    async def _push(self) -> None:
        self._version += 1
        self._ranks.ask(None, "change_weights")
        await self._sync.push(self._version)
        await self._canary()

    async def _canary(self) -> None:
        asked = await ask_canary([self._engine], PROMPTS, max_tokens=6, version=self._version, vocab_size=VOCAB_SIZE)
        compare_canary(asked, await self._logprobs(asked.batch), limit=1e-4)

    async def _logprobs(self, batch: TrainBatch) -> np.ndarray:
        found: list[Any] = self._ranks.ask(None, "logprobs", batch, "policy", False)
        return found[0].get()
