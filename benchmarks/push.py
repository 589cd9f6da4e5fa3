"""A push from training ranks to server processes against the two usual ways to do without it, in turns, with the same ranks and servers.

    python benchmarks/push.py --rounds 5

moerl: every rank packs what it holds into buckets, over ipc (shared memory on CPU), nccl (gloo on CPU) or disk, every installed tensor
verified by the owners' digests.
broadcast: mbridge's export (needs the package mbridge), then one gloo broadcast per tensor from rank 0 to all servers; nothing is verified.
save and reload: the native bridge's export into safetensors on disk, which every server reads back; nothing is verified.

Qwen3-MoE shapes under ep2 on two processes; the driver is a third. A time is from the call until the last server has the last byte in its
model. Extra memory is the growth of the largest resident set of a rank and of a server over what they had before the way ran; what a server
maps of a rank's buffers counts for the rank. The CPU time of the driver's process is printed beside it, and the number of buckets: the
first should not follow from the second.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from push_rank import LAYOUT, Rank
from push_server import Server

from moerl.config.schema.model_config import ScratchModel
from moerl.config.schema.rollout_config import WeightsConfig
from moerl.scratch_model import write_scratch_model
from moerl.train.push.push_source import MegatronSource
from moerl.types.push import TensorSpec, Transport
from moerl.weights.plan.buckets import stored_specs
from moerl.weights.plan.tensor_specs import num_bytes
from moerl.weights.sync import WeightSync

MOERL: tuple[Transport, ...] = ("ipc", "nccl", "disk")
WAYS = (*MOERL, "broadcast", "reload")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--ffn", type=int, default=512)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--bucket-megabytes", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without", nargs="*", default=[], help="ways to leave out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory, model = Path(name), Path(name) / "model"
        sizes = {"hidden_size": options.hidden, "num_heads": 8, "num_kv_heads": 2, "head_dim": options.hidden // 8}
        experts = {"ffn_size": options.ffn, "num_layers": options.layers, "num_experts": options.experts}
        write_scratch_model(ScratchModel(family="qwen3_moe", **sizes, **experts), 64, model, seed=0)
        ways = [way for way in WAYS if way not in options.without]
        ranks = Ranks(directory, model, with_mbridge="broadcast" in ways)
        try:
            asyncio.run(measure(ranks, ways, options))
        finally:
            ranks.close()


class Ranks:
    """The training ranks, seen from the driver."""

    def __init__(self, directory: Path, model: Path, *, with_mbridge: bool):
        self.directory = directory
        self._ranks = [Rank(rank, directory, model, with_mbridge=with_mbridge) for rank in range(LAYOUT.ranks)]

    async def everywhere(self, verb: str, *arguments: Any) -> list[Any]:
        return await asyncio.gather(*(rank.call(verb, *arguments) for rank in self._ranks))

    async def one(self, rank: int, verb: str, *arguments: Any) -> Any:
        return await self._ranks[rank].call(verb, *arguments)

    def close(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()


async def measure(ranks: Ranks, ways: list[str], options: argparse.Namespace) -> None:
    """Each way with servers of its own, whose first time also connects and maps memory, and is not counted."""
    bucket_bytes = int(options.bucket_megabytes * 2**20)
    outline = await ranks.one(0, "outline_push", bucket_bytes)
    specs = {spec.name: spec for spec in stored_specs(outline.tensors)}
    total = sum(map(num_bytes, specs.values()))
    print(f"{total / 1e6:.0f} MB in {len(specs)} tensors, {options.servers} servers, buckets of {options.bucket_megabytes} MiB")
    runs = {way: Way(way, ranks, specs, options.servers, bucket_bytes) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    driver: dict[str, list[float]] = {way: [] for way in ways}
    growths: dict[str, list[int]] = {way: [] for way in ways}
    for round_number in range(options.rounds + 1):
        for way, run in runs.items():
            await ranks.everywhere("reset_growth")
            begin, busy = time.perf_counter(), time.process_time()
            await run.push(round_number)
            seconds[way].append(time.perf_counter() - begin)
            driver[way].append(time.process_time() - busy)
            growths[way].append(max(await ranks.everywhere("growth")))
    memory = {way: (max(growths[way]), await run.peak_growth()) for way, run in runs.items()}
    for run in runs.values():
        run.close()
    report({way: values[1:] for way, values in seconds.items()}, memory, bucket_bytes)
    for way in MOERL:
        if way in runs:
            print(f"{way}: {runs[way].num_buckets} buckets, {1e3 * statistics.median(driver[way][1:]):.0f} ms of the driver's CPU")


def report(seconds: dict[str, list[float]], memory: dict[str, tuple[int, int]], bucket_bytes: int) -> None:
    median = {way: statistics.median(values) for way, values in seconds.items()}
    other = min((value for way, value in median.items() if way not in MOERL), default=float("nan"))
    print("| way | median | every round | better of the others / this | a rank, buckets | a server, buckets |")
    print("| --- | --- | --- | --- | --- | --- |")
    for way, value in median.items():
        rounds = ", ".join(f"{each:.2f}" for each in seconds[way])
        trainer, server = (f"{growth / bucket_bytes:.1f}" for growth in memory[way])
        print(f"| {way} | {value:.3f} s | {rounds} | {other / value:.2f} | {trainer} | {server} |")


class Way:
    """One way to bring the weights, with its own servers."""

    def __init__(self, name: str, ranks: Ranks, specs: dict[str, TensorSpec], num_servers: int, bucket_bytes: int):
        self._name, self._ranks, self._names = name, ranks, list(specs)
        self._servers = {f"server {i}": Server(specs) for i in range(num_servers)}
        if name in MOERL:
            weights = WeightsConfig(bucket_bytes=bucket_bytes, disk_delta=False)
            source = MegatronSource(weights, directory=ranks.directory / "push", all_ranks=self._everywhere, one_rank=self._one)
            self._sync = WeightSync(source, self._servers, transport=name)
        self._is_joined, self.num_buckets = False, 0

    async def push(self, version: int) -> None:
        if self._name in MOERL:
            self.num_buckets = (await self._sync.push(version)).num_buckets
        elif self._name == "broadcast":
            await self._broadcast()
        else:
            await self._ranks.everywhere("save", self._ranks.directory / "saved")
            await self._all_servers("reload", self._ranks.directory / "saved")

    async def peak_growth(self) -> int:
        """Of the server that grew most, in bytes."""
        return max(await self._all_servers("growth"))

    def close(self) -> None:
        for server in self._servers.values():
            server.process.kill()
            server.process.join()

    async def _everywhere(self, verb: str, *arguments: Any) -> list[Any]:
        return await self._ranks.everywhere(verb, *self._own(verb), *arguments)

    async def _one(self, rank: int, verb: str, *arguments: Any) -> Any:
        return await self._ranks.one(rank, verb, *self._own(verb), *arguments)

    def _own(self, verb: str) -> tuple[str, ...]:
        """Ranks keep a sender for every way."""
        return () if verb == "outline_push" else (self._name,)

    async def _broadcast(self) -> None:
        if not self._is_joined:
            world_size = len(self._servers) + 1
            port = await self._ranks.one(0, "open_store")
            joins = [server.ask("join", port, rank, world_size) for rank, server in enumerate(self._servers.values(), start=1)]
            await asyncio.gather(self._ranks.one(0, "join", world_size), *joins)
            names = await self._ranks.one(0, "broadcast_names")
            self._names, self._is_joined = names, True
        await asyncio.gather(self._ranks.everywhere("broadcast"), self._all_servers("receive", self._names))

    async def _all_servers(self, verb: str, *arguments: Any) -> list[Any]:
        return await asyncio.gather(*(server.ask(verb, *arguments) for server in self._servers.values()))


if __name__ == "__main__":
    main()
