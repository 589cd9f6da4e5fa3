"""Training ranks of a test as the source of a push, led by rank 0, which runs the driver too."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moerl.cluster.run_secret import RunSecret
from moerl.config.schema.rollout_config import WeightsConfig
from moerl.models.fp8_blocks import ScaleFormat, quantized
from moerl.train.engine_settings import EngineSettings
from moerl.train.push.push_source import MegatronSource, RankPush
from moerl.types.push import Bucket, TensorSpec, Transport
from moerl.weights.plan.buckets import Job, stored_specs
from moerl.weights.plan.fp8_pairs import fp8_specs, with_scales
from moerl.weights.plan.spec_tensors import spec_of
from moerl.weights.plan.tensor_specs import num_bytes
from moerl.weights.push_calls import in_thread
from moerl.weights.sync import WeightSync
from moerl.weights.verify.digest import tensor_digest

Tensors = dict[str, torch.Tensor]


class Ranks:
    """Rank 0's view of all workers. One call at a time, to all of them or to one: between processes that are not Ray's nothing overlaps."""

    def __init__(self, worker: Any):
        self.worker = worker
        self._one_at_a_time = asyncio.Lock()

    def source(self, *, bucket_bytes: int = 2**14, directory: Path = Path()) -> MegatronSource:
        weights = WeightsConfig(bucket_bytes=bucket_bytes)
        return MegatronSource(weights, directory=directory, all_ranks=self.everywhere, one_rank=self.one)

    async def everywhere(self, verb: str, *arguments: Any) -> list[Any]:
        async with self._one_at_a_time:
            return await in_thread(self.ask, None, verb, *arguments)

    async def one(self, rank: int, verb: str, *arguments: Any) -> Any:
        async with self._one_at_a_time:
            return (await in_thread(self.ask, rank, verb, *arguments))[rank]

    def ask(self, rank: int | None, verb: str, *arguments: Any) -> list[Any]:
        """What the ranks that run it return; raises the first error of one."""
        dist.broadcast_object_list([(rank, verb, arguments)], src=0)
        answers = _run(self.worker, rank, verb, arguments)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


def follow(worker: Any) -> None:
    """Ranks other than 0: run what rank 0 asks for until it says "end"."""
    while True:
        message: list[Any] = [None]
        dist.broadcast_object_list(message, src=0)
        rank, verb, arguments = message[0]
        if verb == "end":
            return
        _run(worker, rank, verb, arguments)


def _run(worker: Any, rank: int | None, verb: str, arguments: tuple[Any, ...]) -> list[Any]:
    answer = None
    if rank in (None, dist.get_rank()):
        try:
            answer = getattr(worker, verb)(*arguments)
        except Exception as error:  # rank 0 raises it
            answer = error
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return answers


def new_worker(settings: EngineSettings, kind: Any) -> Any:
    """`kind`: TrainWorker or a class of it; the engine runs in the present process group."""
    from engine_jobs import new_engine

    worker = kind(dist.get_rank(), dist.get_world_size(), ())
    worker._engine = new_engine(settings)
    set_pushed(worker, worker._engine.pushed)
    return worker


def set_pushed(worker: Any, tensors: Any) -> None:
    """What its pushes send."""
    worker._engine.pushed = tensors
    worker._push = RankPush(tensors, worker._engine.pushing, dist.get_rank(), worker.address())


# -- jobs ------------------------------------------------------------------------------------------------------


def pushed_and_exported(
    settings: EngineSettings, bucket_bytes: int = 5000
) -> tuple[dict[str, str], dict[str, str], dict[str, set[int]], int]:
    """Digests of what a push from all ranks brought, of what an export gives, and by name the ranks that sent; the number of buckets."""
    from session_process import Engine

    from moerl.train.train_worker import TrainWorker

    worker = new_worker(settings, TrainWorker)
    exported = {name: tensor_digest(tensor) for name, tensor in worker._engine.export(with_mtp=settings.pushes_mtp)}
    if dist.get_rank() != 0:
        follow(worker)
        return {}, {}, {}, 0
    ranks = Ranks(worker)
    source = Watched(ranks, 5000)
    engine = Engine(specs_of(source))
    asyncio.run(WeightSync(source, {"server": engine}, transport="ipc").push(1))
    dist.broadcast_object_list([(None, "end", ())], src=0)
    senders: dict[str, set[int]] = {}
    for bucket in source.buckets:
        for entry in bucket.entries:
            senders.setdefault(entry.name, set()).add(bucket.sender)
    return engine.digests(), exported, senders, len(source.buckets)


def fp8_pushed_and_expected(settings: EngineSettings, gathers: bool) -> tuple[dict[str, str], dict[str, str], int, tuple[int, int]]:
    """Digests of what a push brought, those of the whole export quantized, the number of exchanges, and bytes: sent, and in bfloat16.

    `gathers`: as under a bridge that can only export whole tensors.
    """
    from session_process import Engine

    from moerl.train.push.pushed_tensors import PushedTensors
    from moerl.train.train_worker import TrainWorker

    worker = new_worker(settings, TrainWorker)
    if gathers:
        bridge = worker._engine.model.bridge
        bridge.owned = lambda: None
        set_pushed(worker, PushedTensors(bridge, settings.train.layout, torch.bfloat16, settings.model_dir, fp8_scales=settings.push_fp8))
    exported = dict(worker._engine.export(with_mtp=False))
    exchanges, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda *given, **named: exchanges.append(given) or all_reduce(*given, **named)
    if dist.get_rank() != 0:
        follow(worker)
        return {}, {}, 0, (0, 0)
    source = Watched(Ranks(worker), 20_000)
    engine = Engine(specs_of(source))
    asyncio.run(WeightSync(source, {"server": engine}, transport="ipc").push(1))
    dist.broadcast_object_list([(None, "end", ())], src=0)
    expected = {name: tensor_digest(tensor) for item in exported.items() for name, tensor in _in_fp8(*item, settings.push_fp8).items()}
    sent = sum(entry.num_bytes for bucket in source.buckets for entry in bucket.entries)
    return engine.digests(), expected, len(exchanges), (sent, sum(num_bytes(spec_of(*item)) for item in exported.items()))


def _in_fp8(name: str, tensor: torch.Tensor, scale_format: ScaleFormat) -> Tensors:
    """As `moerl convert --dtype fp8` would write it."""
    names = [spec.name for spec in fp8_specs(spec_of(name, tensor))]
    return dict(zip(names, [tensor] if len(names) == 1 else quantized(tensor, scale_format), strict=True))


class Watched(MegatronSource):
    """Keeps the buckets that it is to send."""

    def __init__(self, ranks: Ranks, bucket_bytes: int):
        weights = WeightsConfig(bucket_bytes=bucket_bytes)
        super().__init__(weights, directory=Path(), all_ranks=ranks.everywhere, one_rank=ranks.one)
        self.buckets: list[Bucket] = []

    async def listen(self, transport: Transport, jobs: Mapping[int, Job], seconds: float, secret: RunSecret) -> str:
        self.buckets = [bucket for job in jobs.values() for bucket in job]
        return await super().listen(transport, jobs, seconds, secret)


def specs_of(source: MegatronSource) -> Mapping[str, TensorSpec]:
    outline = asyncio.run(source.outline())
    return {spec.name: spec for spec in stored_specs(outline.tensors)}


def outlines(settings: EngineSettings) -> tuple[list[Any], list[Any]]:
    """The tensors of a run's outline, and those that `moerl plan` plans with, by name."""
    import json

    from moerl.train.push.planned_tensors import tensors_to_push
    from moerl.train.train_worker import TrainWorker

    of_run = new_worker(settings, TrainWorker).outline_push(2**20).tensors
    hf = json.loads((settings.model_dir / "config.json").read_text())
    of_plan = tensors_to_push(hf, settings.train.layout, dtype=settings.export_dtype, with_mtp=settings.pushes_mtp)
    of_plan = with_scales(of_plan) if settings.push_fp8 else of_plan
    by_name = [sorted(tensors, key=lambda tensor: tensor.name) for tensors in (of_run, of_plan)]
    return by_name[0], by_name[1]
