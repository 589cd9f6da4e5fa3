"""A server's model on a GPU of its own process, behind a pipe; a WeightReceiver."""

import asyncio
import os
import threading
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from moerl.types.errors import WeightError
from moerl.types.push import Manifest, Needs, TransportOffer
from moerl.weights.installation import Loader
from moerl.weights.plan.spec_tensors import spec_of, torch_dtype
from moerl.weights.push_calls import in_thread
from moerl.weights.verify.digest import tensor_digest
from moerl.weights.verify.places import Place, Start, copy_into
from moerl.weights.weight_session import WeightSession

MODEL = {f"layers.{layer}.proj": torch.linspace(layer, 4, 4096).reshape(64, 64).to(torch.bfloat16) for layer in range(8)}
MODEL |= {"norm": torch.linspace(0, 1, 7)}
SPECS = {name: spec_of(name, tensor) for name, tensor in MODEL.items()}


class DeviceEngine:
    """Sees no GPU but its own, as a server."""

    def __init__(self, gpu: int):
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._one_at_a_time = threading.Lock()
        self._process = context.Process(target=_serve, args=(theirs, gpu), daemon=True)
        self._process.start()

    def call(self, step: str, *arguments: object) -> object:
        with self._one_at_a_time:
            self._pipe.send((step, arguments))
            result = self._pipe.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    async def needs(self) -> Needs:
        return (tuple(SPECS),)

    async def connect(self, offer: TransportOffer) -> None:
        await in_thread(self.call, "connect", offer)

    async def begin(self, manifest: Manifest) -> None:
        await asyncio.to_thread(self.call, "begin", manifest)

    async def install(self) -> None:
        await in_thread(self.call, "install")

    async def finish(self, version: int, push_id: str) -> None:
        await asyncio.to_thread(self.call, "finish", version)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


class _Model:
    def __init__(self) -> None:
        self._device = torch.device("cuda", 0)
        self._tensors = {spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec), device=self._device) for spec in SPECS.values()}
        self._came_on: set[str] = set()
        self.session = WeightSession(SPECS, Loader(load=self._load), device=self._device)

    def digests(self) -> dict[str, str]:
        return {name: tensor_digest(tensor) for name, tensor in self._tensors.items()}

    def bucket_devices(self) -> set[str]:
        return self._came_on

    def _load(self, name: str, start: Start, piece: torch.Tensor) -> list[Place]:
        self._came_on.add(piece.device.type)
        return copy_into(self._tensors[name], start, piece)


def _serve(pipe: Connection, gpu: int) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)  # before CUDA begins here
    model = _Model()
    while True:
        try:
            step, arguments = pipe.recv()
        except EOFError:
            return
        target = model if step in ("digests", "bucket_devices") else model.session
        try:
            pipe.send(getattr(target, step)(*arguments))
        except WeightError as error:
            pipe.send(error)
