"""What the benchmarks of pushes push to: a model in a process of its own."""

import asyncio
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed import ProcessGroupGloo, TCPStore

from moerl.types.push import Manifest, Needs, TensorSpec, TransportOffer
from moerl.weights.installation import Loader
from moerl.weights.plan.spec_tensors import torch_dtype
from moerl.weights.push_calls import in_thread
from moerl.weights.verify.places import copy_into
from moerl.weights.weight_session import WeightSession

CONTEXT = multiprocessing.get_context("spawn")


class Server:
    """A WeightReceiver whose model lies in another process."""

    def __init__(self, specs: dict[str, TensorSpec]):
        self._pipe, theirs = CONTEXT.Pipe()
        self._names, self._one_at_a_time = tuple(specs), asyncio.Lock()
        self.process = CONTEXT.Process(target=serve, args=(theirs, specs), daemon=True)
        self.process.start()

    async def ask(self, verb: str, *arguments: Any) -> Any:
        async with self._one_at_a_time:
            self._pipe.send((verb, arguments))
            result = await in_thread(self._pipe.recv)
        if isinstance(result, Exception):
            raise result
        return result

    async def needs(self) -> Needs:
        return (self._names,)

    async def connect(self, offer: TransportOffer) -> None:
        await self.ask("connect", offer)

    async def begin(self, manifest: Manifest) -> None:
        await self.ask("begin", manifest)

    async def install(self) -> None:
        await self.ask("install")

    async def finish(self, version: int, push_id: str) -> None:
        await self.ask("finish", version)


class Model:
    def __init__(self, specs: dict[str, TensorSpec]):
        self.tensors = {name: torch.ones(spec.shape, dtype=torch_dtype(spec)) for name, spec in specs.items()}
        self.session = WeightSession(specs, Loader(load=lambda name, start, piece: copy_into(self.tensors[name], start, piece)))
        self._before = resident("VmRSS")
        reset_peak()

    def join(self, port: int, rank: int, world_size: int) -> None:
        self._store = TCPStore("127.0.0.1", port, is_master=False)
        self._group = ProcessGroupGloo(self._store, rank, world_size)

    def receive(self, names: list[str]) -> None:
        for name in names:
            tensor = torch.empty_like(self.tensors[name])
            self._group.broadcast(tensor, 0).wait()
            self.tensors[name].copy_(tensor)

    def reload(self, directory: Path) -> None:
        for file in directory.glob("*.safetensors"):
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118  # no mapping
                    self.tensors[name].copy_(stored.get_tensor(name))

    def growth(self) -> int:
        """Without the trainer's buffers, which it maps and the trainer counts."""
        return resident("VmHWM") - self._before - mapped_buffers()


def serve(pipe: Connection, specs: dict[str, TensorSpec]) -> None:
    torch.set_num_threads(1)
    model = Model(specs)
    while True:
        verb, arguments = pipe.recv()
        target: Callable[..., Any] = getattr(model if hasattr(model, verb) else model.session, verb)
        try:
            pipe.send(target(*arguments))
        except Exception as error:
            pipe.send(error)


def resident(field: str) -> int:
    """Bytes. VmRSS: now. VmHWM: the most since `reset_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def mapped_buffers() -> int:
    """Resident bytes of weight senders' memory in this process."""
    lines, total, is_buffer = Path("/proc/self/smaps").read_text().splitlines(), 0, False
    for line in lines:
        if "-" in line.split(" ", 1)[0]:
            is_buffer = "memfd:moerl-weights" in line
        elif is_buffer and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
