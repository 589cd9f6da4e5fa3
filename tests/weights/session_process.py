"""Real processes for the weight tests: a WeightSession or a WeightSender behind a pipe, and a trainer of one process."""

import asyncio
import multiprocessing
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from local_source import LocalSource

from moerl.cluster.run_secret import RunSecret
from moerl.types.errors import EngineError, WeightError
from moerl.types.push import Manifest, Needs, TensorSpec, Transport, TransportOffer
from moerl.weights.installation import Loader
from moerl.weights.plan.buckets import Job, manifest_of
from moerl.weights.plan.run_plan import plan_deliveries
from moerl.weights.plan.spec_tensors import spec_of, torch_dtype
from moerl.weights.push_calls import in_thread
from moerl.weights.verify.digest import tensor_digest
from moerl.weights.verify.places import Place, Start, copy_into
from moerl.weights.weight_session import WeightSession

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["moerl.weights.weight_session"])

MODEL = {
    "embed.weight": torch.linspace(-1, 1, 64 * 33).reshape(64, 33),
    "layers.0.mlp.experts.0.up_proj.weight": torch.arange(3000, dtype=torch.bfloat16).reshape(30, 100),
    "layers.0.norm.weight": torch.linspace(0, 1, 7, dtype=torch.float16),
    "layers.0.mlp.gate.e_score_correction_bias": torch.tensor(0.25),
    "layers.1.proj.weight": torch.linspace(-4, 4, 128 * 64).reshape(128, 64).to(torch.float8_e4m3fn),
    "steps": torch.tensor([2**62, -1]),
    "nothing": torch.empty(0, 5),
}
SPECS = {name: spec_of(name, tensor) for name, tensor in MODEL.items()}


class Engine:
    """A model that starts as zeros, and its session. The loader damages tensor `damages`, and fails on tensor `fails_on`. `takes_whole`: it
    takes no pieces."""

    def __init__(
        self,
        specs: Mapping[str, TensorSpec] = SPECS,
        *,
        needs: Collection[str] | None = None,
        damages: str = "",
        fails_on: str = "",
        takes_whole: bool = False,
    ):
        held = specs if needs is None else needs
        self.tensors = {name: torch.zeros(specs[name].shape).to(torch_dtype(specs[name])) for name in held}
        loader = Loader(load=self.load, takes_whole=lambda name: takes_whole)
        self.session = WeightSession(specs, loader, needs=needs, read=self.tensors.__getitem__)
        self.damages, self.fails_on = damages, fails_on

    def load(self, name: str, start: Start, piece: torch.Tensor) -> list[Place]:
        if name == self.fails_on:
            raise KeyError(name)
        places = copy_into(self.tensors[name], start, piece)
        if name == self.damages:
            self.tensors[name].view(torch.uint8).reshape(-1)[0] ^= 1
        return places

    def names(self) -> tuple[str, ...]:
        return self.session.needs

    def damage(self, name: str) -> None:
        self.damages = name

    def digests(self) -> dict[str, str]:
        return {name: tensor_digest(tensor) for name, tensor in self.tensors.items()}

    def forget_peak(self) -> None:
        self._before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")

    def growth(self) -> int:
        """Bytes of this process at its peak since `forget_peak`, above those that it had then."""
        return _resident("VmHWM") - self._before

    async def needs(self) -> Needs:
        return (self.session.needs,)

    async def connect(self, offer: TransportOffer) -> None:
        await in_thread(self.session.connect, offer)

    async def begin(self, manifest: Manifest) -> None:
        await asyncio.to_thread(self.session.begin, manifest)

    async def install(self) -> None:
        await in_thread(self.session.install)

    async def finish(self, version: int, push_id: str) -> None:
        await asyncio.to_thread(self.session.finish, version)


def _resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


class EngineProcess:
    """An Engine in its own process; a WeightReceiver."""

    def __init__(self, **engine_arguments: object):
        self._pipe, theirs = CONTEXT.Pipe()
        self._one_at_a_time = threading.Lock()
        self.process = CONTEXT.Process(target=_serve_engine, args=(theirs, engine_arguments), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, step: str, *arguments: object) -> object:
        try:
            with self._one_at_a_time:
                self._pipe.send((step, arguments))
                result = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise EngineError(f"server process {self.process.pid} died") from error
        if isinstance(result, BaseException):
            raise result
        return result

    async def needs(self) -> Needs:
        return (await asyncio.to_thread(self.call, "names"),)

    async def connect(self, offer: TransportOffer) -> None:
        await in_thread(self.call, "connect", offer)

    async def begin(self, manifest: Manifest) -> None:
        await asyncio.to_thread(self.call, "begin", manifest)

    async def install(self) -> None:
        await in_thread(self.call, "install")

    async def finish(self, version: int, push_id: str) -> None:
        await asyncio.to_thread(self.call, "finish", version)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _serve_engine(pipe: Connection, engine_arguments: dict) -> None:
    torch.set_num_threads(1)
    engine = Engine(**engine_arguments)
    while True:
        try:
            step, arguments = pipe.recv()
        except EOFError:
            return
        target = engine.session if hasattr(engine.session, step) else engine
        try:
            pipe.send(getattr(target, step)(*arguments))
        except WeightError as error:
            pipe.send(error)


class Source(LocalSource):
    """The trainer's side, whose `model` may be changed between pushes."""

    def __init__(
        self, model: Mapping[str, torch.Tensor] = MODEL, *, bucket_bytes: int = 8192, before: Callable[[int], None] | None = None,
        **sender: object,
    ):  # fmt: skip
        """`before`: called ahead of every bucket with its index."""
        self.model = dict(model)
        self.num_listens = 0
        self._before = before
        super().__init__(lambda: self.model, bucket_bytes=bucket_bytes, **sender)

    async def listen(self, transport: Transport, jobs: Mapping[int, Job], seconds: float, secret: RunSecret) -> str:
        self.num_listens += 1
        address = await super().listen(transport, jobs, seconds, secret)
        if self._before is not None:
            pack, before = self.sender.pack, self._before
            self.sender.pack = lambda index: before(index) or pack(index)  # type: ignore[method-assign,func-returns-value]
        return address


def first_push(
    source: Source, transport: Transport = "ipc", *, version: int = 1, readers: int = 1, processes: int = 1
) -> tuple[Manifest, TransportOffer]:
    """The manifest, and the offer to the first of `readers`, servers of `processes` each, who need everything. Nobody has connected yet."""

    async def prepare() -> tuple[Manifest, TransportOffer]:
        outline = await source.outline()
        names = tuple(tensor.name for tensor in outline.tensors)
        found = plan_deliveries(outline, {f"server{i}": (names,) * processes for i in range(readers)})
        secret = RunSecret.new()
        address = await source.listen(transport, found.jobs, 10.0, secret)
        offer = TransportOffer(
            transport=transport, address=address, server="server0", senders=(0,), num_readers=readers * processes, reader=0,
            buckets=found.jobs[0], seconds=10.0, secret=secret.key,
        )  # fmt: skip
        return manifest_of(found, await source.digests(), version=version), offer

    return asyncio.run(prepare())


def serve_sender(pipe: Connection) -> None:
    """Sends MODEL in two buckets, and waits to be ended."""
    source = Source(bucket_bytes=2**20)
    manifest, offer = first_push(source)
    pipe.send((manifest, offer))
    asyncio.run(source.connect(offer.address, 1))
    asyncio.run(source.send())
    pipe.recv()


class Halves:
    """A server whose two model processes each hold half of the experts; a WeightReceiver over two real processes."""

    def __init__(self, *processes: "EngineProcess"):
        self.processes = processes

    async def needs(self):
        return tuple([(await process.needs())[0] for process in self.processes])

    async def connect(self, offer):
        offers = [replace(offer, reader=offer.reader + i) for i in range(2)]
        await asyncio.gather(*(process.connect(mine) for process, mine in zip(self.processes, offers, strict=True)))

    async def begin(self, manifest):
        await asyncio.gather(*(process.begin(manifest) for process in self.processes))

    async def install(self):
        await asyncio.gather(*(process.install() for process in self.processes))

    async def finish(self, version, push_id):
        await asyncio.gather(*(process.finish(version, push_id) for process in self.processes))
