"""Pushes whose buckets stay on GPUs: CUDA IPC between processes, NCCL between trainer and servers. Not run so far (design/weights.md)."""

import asyncio
from multiprocessing import get_context

import pytest
import torch
from device_engine import MODEL, DeviceEngine
from local_source import LocalSource
from ranked_source import RankedSource, on_two_nodes

from moerl.config.schema.layout import Layout
from moerl.types.errors import WeightError
from moerl.weights.sync import WeightSync
from moerl.weights.transport.gpu_transport import DeviceBuffer, map_device
from moerl.weights.verify.block_hashes import block_hashes, by_torch
from moerl.weights.verify.digest import tensor_digest

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize(
    ("transport", "gpus", "nodes"),
    [
        ("ipc", [0], None),
        ("ipc", [0, 0], None),
        pytest.param("ipc", [1], None, marks=pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")),
        # NCCL wants a GPU for every rank: the sender has the first.
        pytest.param("nccl", [1], None, marks=pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")),
        pytest.param("nccl", [1, 2], None, marks=pytest.mark.skipif(NUM_GPUS < 3, reason="needs three GPUs")),
        pytest.param(
            "nccl", [1, 2], {"server0": ["x"], "server1": ["y"]}, marks=pytest.mark.skipif(NUM_GPUS < 3, reason="needs three GPUs")
        ),
    ],
)
def test_every_byte_arrives_push_after_push_and_no_bucket_is_in_host_memory(transport, gpus, nodes):
    held = {name: tensor.cuda(0) for name, tensor in MODEL.items()}
    source = LocalSource(lambda: held, bucket_bytes=20_000, device=torch.device("cuda", 0))
    engines = {f"server{number}": DeviceEngine(gpu) for number, gpu in enumerate(gpus)}

    async def push_twice():
        sync = WeightSync(source, engines, transport=transport, nodes=nodes)
        await sync.push(1)
        for tensor in held.values():
            tensor.mul_(2)
        return await sync.push(2)

    try:
        stats = asyncio.run(push_twice())
        assert stats.num_buckets > 2
        expected = {name: tensor_digest(tensor) for name, tensor in held.items()}
        assert [engine.call("digests") for engine in engines.values()] == [expected] * len(engines)
        assert [engine.call("bucket_devices") for engine in engines.values()] == [{"cuda"}] * len(engines)
    finally:
        source.close()
        for engine in engines.values():
            engine.close()


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
def test_ranks_relay_to_servers_on_their_gpus_and_no_bucket_is_in_host_memory():
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    source = RankedSource(
        {name: tensor.cuda(0) for name, tensor in MODEL.items()}, Layout(ranks=2, pp=2), bucket_bytes=20_000, devices=devices
    )
    engines = {"server0": DeviceEngine(0), "server1": DeviceEngine(1)}
    try:
        stats = asyncio.run(WeightSync(source, engines, transport="relay", **on_two_nodes({"server0": "x", "server1": "y"}, 2)).push(1))
        assert stats.num_network == sum(tensor.nbytes for tensor in MODEL.values())
        expected = {name: tensor_digest(tensor) for name, tensor in source.model.items()}
        assert [engine.call("digests") for engine in engines.values()] == [expected] * 2
        assert [engine.call("bucket_devices") for engine in engines.values()] == [{"cuda"}] * 2
    finally:
        source.close()
        for engine in engines.values():
            engine.close()


def map_in_child(source, pipe, gpu=0):
    torch.cuda.set_device(gpu)
    try:
        memory = map_device(source)
        assert memory.device.index == gpu
        pipe.send((memory.device.type, memory.sum().item()))
        memory.fill_(3)
        torch.cuda.synchronize()
    except WeightError as error:
        pipe.send(str(error))


@pytest.mark.parametrize("gpu", [0, pytest.param(1, marks=pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs"))])
def test_memory_on_a_gpu_is_the_same_memory_in_another_process(gpu):
    """`gpu`: the other process's own, of which it sees both."""
    context = get_context("spawn")
    buffer = DeviceBuffer(torch.device("cuda", 0))
    for size in (1000, 10_000):  # it grows: another allocation, another source
        before, memory = buffer.source, buffer.reserve(size)
        assert buffer.source != before
        memory.fill_(1)
        torch.cuda.synchronize()
        mine, theirs = context.Pipe()
        child = context.Process(target=map_in_child, args=(buffer.source, theirs, gpu))
        child.start()
        assert mine.recv() == ("cuda", size)
        child.join()
        assert memory.eq(3).all()
    buffer.close()


@pytest.mark.parametrize("size", [0, 1, 5000, 64 * 1024, 2**24 + 3])
def test_a_digest_that_a_gpu_makes_is_the_host_s(size):
    """By the kernel of Triton, and by PyTorch's operators."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert tensor_digest(data.cuda()) == tensor_digest(data)
    blocks = data[: size // 1024 * 1024].view(-1, 1024).cuda()
    assert by_torch(blocks.view(torch.int64)).equal(block_hashes(blocks)) or not len(blocks)
