"""Throughput of one weight push into one server process, for each transport, against a plain copy of the same bytes in memory.

    python benchmarks/weight_push.py --megabytes 256

A push digests every byte where it is, copies it into a bucket, moves it, copies it into the model and digests it again. One bucket is
packed while the server installs another. Beside the digest, one xxh3_128 of each whole tensor, and the digest by the operators that a GPU
without Triton runs.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from push_server import Server

from moerl.types.push import Transport
from moerl.weights.plan.spec_tensors import spec_of
from moerl.weights.sync import WeightSync
from moerl.weights.verify.digest import halves_on_device, tensor_bytes, tensor_digest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "suite"))

from local_source import LocalSource


def make_model(megabytes: int) -> dict[str, torch.Tensor]:
    """bfloat16: per 8 MB one matrix of 7 MB, one of 1 MB and a norm."""
    model = {}
    for layer in range(megabytes // 8):
        model[f"layers.{layer}.mlp.weight"] = torch.randn(1792, 2048).to(torch.bfloat16)
        model[f"layers.{layer}.attention.weight"] = torch.randn(256, 2048).to(torch.bfloat16)
        model[f"layers.{layer}.norm.weight"] = torch.ones(2048, dtype=torch.bfloat16)
    return model


def best_seconds(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


async def push_seconds(transport: Transport, model: dict[str, torch.Tensor], bucket_bytes: int, repeats: int) -> float:
    """Of the fastest push after a first one that also maps memory."""
    trainer, server = (
        LocalSource(lambda: model, bucket_bytes=bucket_bytes),
        Server({name: spec_of(name, tensor) for name, tensor in model.items()}),
    )
    try:
        sync = WeightSync(trainer, {"server": server}, transport=transport)
        return min([(await sync.push(version)).seconds for version in range(1 + repeats)][1:])
    finally:
        server.process.kill()
        server.process.join()
        trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--bucket-megabytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model(arguments.megabytes)
    num_bytes = sum(tensor.nbytes for tensor in model.values())
    copies = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    seconds = {
        "memory copy": best_seconds(lambda: [copies[name].copy_(tensor) for name, tensor in model.items()], arguments.repeats),
        "digest": best_seconds(lambda: [tensor_digest(tensor) for tensor in model.values()], arguments.repeats),
        "xxh3 whole": best_seconds(lambda: [xxhash.xxh3_128(tensor_bytes(tensor).numpy()) for tensor in model.values()], arguments.repeats),
        "by PyTorch": best_seconds(lambda: [halves_on_device(tensor_bytes(tensor)) for tensor in model.values()], 1),
    }
    for transport in ("ipc", "nccl"):
        seconds[transport] = asyncio.run(push_seconds(transport, model, arguments.bucket_megabytes * 2**20, arguments.repeats))
    print(f"{num_bytes / 1e6:.0f} MB in {len(model)} tensors, buckets of {arguments.bucket_megabytes} MiB, best of {arguments.repeats}")
    for name, value in seconds.items():
        print(f"{name:12} {value * 1e3:8.1f} ms {num_bytes / value / 1e9:7.2f} GB/s {value / seconds['memory copy']:6.1f} x a memory copy")


if __name__ == "__main__":
    main()
