"""A training rank of the push benchmark, in a process of its own: Megatron's model with its bridges, and senders of its own."""

import asyncio
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from push_server import CONTEXT, reset_peak, resident
from torch.distributed import ProcessGroupGloo, TCPStore

from moerl.config.schema.layout import Layout
from moerl.config.schema.train_config import OptimizerConfig, TrainConfig
from moerl.train.push.push_source import PushOrder, RankPush
from moerl.weights.plan.run_plan import Outline
from moerl.weights.push_calls import in_thread

LAYOUT = Layout(ranks=2, ep=2)


class Rank:
    """Seen from the driver."""

    def __init__(self, rank: int, directory: Path, model: Path, *, with_mbridge: bool):
        self._pipe, theirs = CONTEXT.Pipe()
        self._one_at_a_time = asyncio.Lock()
        self.process = CONTEXT.Process(target=serve_rank, args=(theirs, rank, directory, model, with_mbridge), daemon=True)
        self.process.start()

    async def call(self, verb: str, *arguments: Any) -> Any:
        async with self._one_at_a_time:
            self._pipe.send((verb, arguments))
            answer = await in_thread(self._pipe.recv)
        if isinstance(answer, Exception):
            raise answer
        return answer


def serve_rank(pipe: Connection, rank: int, directory: Path, model: Path, with_mbridge: bool) -> None:
    import megatron_patches

    warnings.simplefilter("ignore")
    megatron_patches.activate()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=LAYOUT.ranks)
    worker = Worker(rank, model, with_mbridge=with_mbridge)
    while True:
        verb, arguments = pipe.recv()
        try:
            pipe.send(getattr(worker, verb)(*arguments))
        except Exception as error:
            pipe.send(error)


class Worker:
    """`way`: every way of pushing has a TrainWorker of its own, over the same weights."""

    def __init__(self, rank: int, model: Path, *, with_mbridge: bool):
        from moerl.models.hf_checkpoint import HFCheckpoint
        from moerl.train.megatron.megatron_model import build_model
        from moerl.train.megatron.process_groups import initialize_groups
        from moerl.train.push.pushed_tensors import PushedTensors

        initialize_groups(LAYOUT, 1)
        self._rank, self._bridges = rank, {}
        for name in ["native"] + ["mbridge"] * with_mbridge:
            train = TrainConfig(optimizer=OptimizerConfig(lr=1e-6), layout=LAYOUT, dtype="bfloat16", bridge=name)
            self._bridges[name] = build_model(model, train, max_context=64).bridge
            with HFCheckpoint(model) as checkpoint:
                self._bridges[name].load(checkpoint)
        self.pushed = PushedTensors(self._bridges["native"], LAYOUT, torch.bfloat16, model, fp8_scales=None)
        self._pushes: dict[str, RankPush] = {}
        self._before = 0

    def reset_growth(self) -> None:
        reset_peak()
        self._before = resident("VmRSS")

    def growth(self) -> int:
        return resident("VmHWM") - self._before

    # -- moerl's ways ----------------------------------------------------------------------------------------------

    @contextmanager
    def pushing(self, *, begins: bool = False) -> Iterator[None]:
        """What a push asks a rank's engine for."""
        yield

    def outline_push(self, bucket_bytes: int) -> Outline:
        return self.pushed.outline(bucket_bytes)

    def listen(self, way: str, order: PushOrder) -> str:
        self._pushes[way] = RankPush(self.pushed, self.pushing, self._rank, "127.0.0.1")
        return self._pushes[way].listen(order)

    def connect(self, way: str, address: str, num_readers: int) -> None:
        self._pushes[way].connect(address, num_readers)

    def digest_push(self, way: str) -> Any:
        return self._pushes[way].digests()

    def send_push(self, way: str) -> Any:
        return self._pushes[way].send()

    def finish_push(self, way: str) -> None:
        self._pushes[way].finish()

    # -- the others ------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        from moerl.models.hf_checkpoint import write_shards

        tensors = self._bridges["native"].export(torch.bfloat16, with_mtp=False)
        if self._rank == 0:
            directory.mkdir(exist_ok=True)
            write_shards(tensors, directory, shard_bytes=5 * 10**9)
        for _ in tensors:
            pass

    def open_store(self) -> int:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def join(self, world_size: int) -> None:
        self._group = ProcessGroupGloo(self._store, 0, world_size)

    def broadcast_names(self) -> list[str]:
        return list(self._bridges["mbridge"].names(with_mtp=False))

    def broadcast(self) -> None:
        for _, tensor in self._bridges["mbridge"].export(torch.bfloat16, with_mtp=False):
            self._group.broadcast(tensor.contiguous(), 0).wait()
