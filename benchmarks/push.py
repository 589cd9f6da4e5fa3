"""A push from training ranks to server processes against the two usual ways to do without it, in turns, with the same ranks and servers.

    python benchmarks/push.py --rounds 5

moerl: the native bridge's export, packed into buckets, over shm, gloo or disk, every installed tensor verified.
broadcast: mbridge's export (needs the package mbridge), then one gloo broadcast per tensor from rank 0 to all servers; nothing is verified.
save and reload: the native bridge's export into safetensors on disk, which every server reads back; nothing is verified.

Qwen3-MoE shapes under ep2 on two processes. A time is from the call until the last server has the last byte in its model. Extra memory
is the growth of the largest resident set of rank 0 and of a server over what they had before the way ran, each in processes of its own.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from push_server import CONTEXT, Server, reset_peak, resident
from torch.distributed import ProcessGroupGloo, TCPStore

from moerl.config.layout import Layout
from moerl.config.schema import ScratchModel
from moerl.config.schema_train import OptimizerConfig, TrainConfig
from moerl.models.scratch import write_scratch_model
from moerl.push_types import Bucket, Manifest, Origin, TensorSpec, Transport
from moerl.weights.send import WeightSender
from moerl.weights.spec import spec_of, torch_dtype
from moerl.weights.sync import WeightSync

LAYOUT = Layout(ranks=2, ep=2)
MOERL: tuple[Transport, ...] = ("shm", "gloo", "disk")
WAYS = (*MOERL, "broadcast", "reload")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--ffn", type=int, default=512)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--bucket-megabytes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without", nargs="*", default=[], help="ways to leave out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        sizes = {"hidden_size": options.hidden, "num_heads": 8, "num_kv_heads": 2, "head_dim": options.hidden // 8}
        experts = {"ffn_size": options.ffn, "num_layers": options.layers, "num_experts": options.experts}
        write_scratch_model(ScratchModel(family="qwen3_moe", **sizes, **experts), 64, model, seed=0)
        ways = [way for way in WAYS if way not in options.without]
        ranks = [CONTEXT.Process(target=rank_main, args=(rank, Path(directory), model, ways, options)) for rank in range(LAYOUT.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


# -- training ranks --------------------------------------------------------------------------------------------


def rank_main(rank: int, directory: Path, model: Path, ways: list[str], options: argparse.Namespace) -> None:
    import megatron_patches

    warnings.simplefilter("ignore")
    megatron_patches.activate()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=LAYOUT.ranks)
    from moerl.models.checkpoint import HFCheckpoint
    from moerl.train.model import build_model, initialize_groups

    initialize_groups(LAYOUT, 1)
    bridges = {}
    for name in ["native"] + ["mbridge"] * ("broadcast" in ways):
        train = TrainConfig(optimizer=OptimizerConfig(lr=1e-6), layout=LAYOUT, dtype="bfloat16", bridge=name)
        bridges[name] = build_model(model, train, max_context=64).bridge
        with HFCheckpoint(model) as checkpoint:
            bridges[name].load(checkpoint)
    ranks = Ranks(bridges, directory, options.bucket_megabytes * 2**20)
    if rank == 0:
        measure(ranks, ways, options)
    else:
        ranks.follow()
    dist.destroy_process_group()


class Ranks:
    """The trainer's side of every way; on rank 0 a WeightSource too."""

    def __init__(self, bridges: dict[str, Any], directory: Path, bucket_bytes: int):
        self.bridges, self.directory, self._bucket_bytes = bridges, directory, bucket_bytes
        self._origins: dict[str, Origin] = {}
        self._tensors: Iterator[tuple[str, torch.Tensor]] = iter(())

    def follow(self) -> None:
        """Ranks other than 0: whatever rank 0 calls."""
        while (verb := self._share("")) != "end":
            if verb == "origins":
                self.find_origins()
            else:
                for _ in self.bridges[verb].export(torch.bfloat16, with_mtp=False):
                    pass

    def call(self, verb: str) -> None:
        self._share(verb)

    def export(self, bridge: str) -> Iterator[tuple[str, torch.Tensor]]:
        self.call(bridge)
        yield from self.bridges[bridge].export(torch.bfloat16, with_mtp=False)

    def find_origins(self) -> None:
        from moerl.train.origins import find_origins

        self._origins = find_origins(self.bridges["native"], torch.bfloat16)

    def specs(self) -> dict[str, TensorSpec]:
        return {name: spec_of(name, tensor) for name, tensor in self.export("native")}

    async def manifest(self, version: int) -> Manifest:
        self.call("origins")
        self.find_origins()
        return Manifest(version=version, tensors=tuple(self.known.values()), origins=self._origins)

    async def listen(self, transport: Transport, num_receivers: int) -> str:
        self.sender = WeightSender(transport, bucket_bytes=self._bucket_bytes, directory=self.directory / "push", delta=False)
        return self.sender.listen(num_receivers)

    async def connect(self) -> None:
        await asyncio.to_thread(self.sender.connect)

    async def next_bucket(self, index: int) -> Bucket | None:
        if index == 0:
            self._tensors = self.export("native")
        return self.sender.pack(index, self._tensors, origins=self._origins)

    async def transmit(self, bucket: Bucket) -> None:
        await asyncio.to_thread(self.sender.transmit, bucket)

    async def abandon(self) -> None:
        for _ in self._tensors:
            pass

    def _share(self, verb: str) -> str:
        message: list[str | None] = [verb]
        dist.broadcast_object_list(message, src=0)
        assert message[0] is not None
        return message[0]


def measure(ranks: Ranks, ways: list[str], options: argparse.Namespace) -> None:
    """Each way with servers of its own, whose first time also connects and maps memory, and is not counted."""
    ranks.known = ranks.specs()
    num_bytes = sum(torch_dtype(spec).itemsize * torch.Size(spec.shape).numel() for spec in ranks.known.values())
    print(f"{num_bytes / 1e6:.0f} MB in {len(ranks.known)} tensors, {options.servers} servers, buckets of {options.bucket_megabytes} MiB")
    runs = {way: Way(way, ranks, options.servers) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for round_number in range(options.rounds + 1):
        for way, run in runs.items():
            begin = time.perf_counter()
            run.push(round_number)
            seconds[way].append(time.perf_counter() - begin)
    memory = {way: run.peak_growth() for way, run in runs.items()}
    for run in runs.values():
        run.close()
    ranks.call("end")
    report({way: values[1:] for way, values in seconds.items()}, memory, options.bucket_megabytes * 2**20)


def report(seconds: dict[str, list[float]], memory: dict[str, tuple[int, int]], bucket_bytes: int) -> None:
    median = {way: statistics.median(values) for way, values in seconds.items()}
    other = min((value for way, value in median.items() if way not in MOERL), default=float("nan"))
    print("| way | median | every round | better of the others / this | rank 0, buckets | server, buckets |")
    print("| --- | --- | --- | --- | --- | --- |")
    for way, value in median.items():
        rounds = ", ".join(f"{each:.2f}" for each in seconds[way])
        trainer, server = (f"{growth / bucket_bytes:.1f}" for growth in memory[way])
        print(f"| {way} | {value:.3f} s | {rounds} | {other / value:.2f} | {trainer} | {server} |")


class Way:
    """One way to bring the weights, with its own servers."""

    def __init__(self, name: str, ranks: Ranks, num_servers: int):
        self._name, self._ranks = name, ranks
        self._servers = {f"server {i}": Server(ranks.known) for i in range(num_servers)}
        self._peak = 0
        self._group: ProcessGroupGloo | None = None
        if name in MOERL:
            self._loop = asyncio.new_event_loop()
            self._sync = WeightSync(ranks, self._servers, transport=name)
        if name == "broadcast":
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._all("join", *((self._store.port, i, num_servers + 1) for i in range(1, num_servers + 1)), wait=False)
            self._group = ProcessGroupGloo(self._store, 0, num_servers + 1)
            self._answers()

    def push(self, version: int) -> None:
        reset_peak()
        before = resident("VmRSS")
        if self._name in MOERL:
            sender = getattr(self, "_sender", None)
            if sender is not None:
                self._ranks.sender = sender
            self._loop.run_until_complete(self._sync.push(version))
            self._sender = self._ranks.sender
        elif self._name == "broadcast":
            self._broadcast()
        else:
            self._save_and_reload()
        self._peak = max(self._peak, resident("VmHWM") - before)

    def peak_growth(self) -> tuple[int, int]:
        """Of rank 0 and of the server that grew most, in bytes."""
        self._all("growth", *[()] * len(self._servers), wait=False)
        return self._peak, max(self._answers())

    def close(self) -> None:
        for server in self._servers.values():
            server.process.kill()
            server.process.join()

    def _broadcast(self) -> None:
        assert self._group is not None
        names = self._ranks.bridges["mbridge"].names(with_mtp=False)
        self._all("receive", *[(names,)] * len(self._servers), wait=False)
        for _, tensor in self._ranks.export("mbridge"):
            self._group.broadcast(tensor.contiguous(), 0).wait()
        self._answers()

    def _save_and_reload(self) -> None:
        from moerl.models.checkpoint import write_shards

        target = self._ranks.directory / "saved"
        target.mkdir(exist_ok=True)
        write_shards(self._ranks.export("native"), target, shard_bytes=5 * 10**9)
        self._all("reload", *[(target,)] * len(self._servers))

    def _all(self, verb: str, *arguments: tuple[Any, ...], wait: bool = True) -> None:
        for server, each in zip(self._servers.values(), arguments, strict=True):
            server.pipe.send((verb, each))
        if wait:
            self._answers()

    def _answers(self) -> list[Any]:
        return [server.answer() for server in self._servers.values()]


if __name__ == "__main__":
    main()
