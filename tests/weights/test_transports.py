"""Weights between real processes."""

import asyncio
import json
import os
import re
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranked_source import RankedSource, on_two_nodes
from session_process import CONTEXT, MODEL, EngineProcess, Halves, Source, first_push, serve_sender

from moerl.cluster.error_texts import is_consequence
from moerl.config.schema.layout import Layout
from moerl.rollout.engines.process_push import needs_of_processes
from moerl.types.errors import HangError, WeightError
from moerl.types.push import Bucket
from moerl.weights.plan.spec_tensors import box_of, spec_of
from moerl.weights.sync import WeightSync
from moerl.weights.transport.gpu_transport import ON_GPU, map_device
from moerl.weights.transport.network_transport import DEVICE_KEY
from moerl.weights.transport.shared_memory import SharedBuffer, SharedReader
from moerl.weights.verify.digest import tensor_digest

DIGESTS = {name: tensor_digest(tensor) for name, tensor in MODEL.items()}


@pytest.fixture
def start():
    """Starts engine processes and ends them after the test."""
    started = []

    def start_one(**engine_arguments):
        started.append(EngineProcess(**engine_arguments))
        return started[-1]

    yield start_one
    for engine in started:
        engine.close()


@pytest.fixture
def make_source():
    sources = []

    def make(transport="ipc", *, model=MODEL, **arguments):
        """Of one rank; to relay, of two stages on two nodes."""
        if transport == "relay":
            sources.append(RankedSource(model, Layout(ranks=2, pp=2), bucket_bytes=8192, **arguments))
        else:
            sources.append(Source(model=model, **arguments))
        return sources[-1]

    yield make
    for source in sources:
        source.close()


def named(*engines):
    return {f"server{i}": engine for i, engine in enumerate(engines)}


def places(transport, engines):
    """The first server is on the second rank's node, where half of what it reads comes from the first."""
    return on_two_nodes({name: "yxy"[i % 3] for i, name in enumerate(engines)}, 2) if transport == "relay" else {}


@pytest.mark.parametrize("transport", ["ipc", "nccl", "relay"])
def test_every_byte_arrives_in_every_process_push_after_push(transport, start, make_source):
    source, engines = make_source(transport), named(start(), start())
    sync = WeightSync(source, engines, transport=transport, **places(transport, engines))

    async def push_twice():
        first = await sync.push(1)
        source.model["steps"] = source.model["steps"] + 1
        return first, await sync.push(2)

    first, second = asyncio.run(push_twice())
    assert (first.version, second.version, second.num_tensors) == (1, 2, len(MODEL))
    assert first.num_buckets > 2
    assert first.num_bytes == second.num_bytes >= sum(tensor.nbytes for tensor in MODEL.values())
    assert source.num_listens == 1
    expected = DIGESTS | {"steps": tensor_digest(MODEL["steps"] + 1)}
    assert [engine.call("digests") for engine in engines.values()] == [expected, expected]


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_nothing_of_a_push_stays_in_the_senders_memory_or_mapped_of_it(transport, start, make_source):
    source, engine = make_source(), start()
    sync = WeightSync(source, named(engine), transport=transport)
    held = []
    upstream = source.finish

    async def finish():
        held.append(_held(source.sender))
        await upstream()

    source.finish = finish
    asyncio.run(sync.push(1))
    mapped = Path(f"/proc/{engine.process.pid}/maps").read_text()
    assert held[0] > 0 and _held(source.sender) == 0
    assert "moerl-weights" not in mapped or transport == "nccl"  # there it is the receiver's own memory


def _held(sender):
    """Bytes in the pages of its buffers."""
    return sum(os.stat(buffer.source).st_blocks * 512 for buffer in sender._buffers)


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_processes_of_a_server_get_the_experts_they_serve_and_no_others(transport, start, make_source):
    model = {f"layers.0.mlp.experts.{expert}.up_proj.weight": torch.full((40, 30), float(expert)) for expert in range(8)}
    model |= {"norm.weight": torch.ones(7)}
    specs = {name: spec_of(name, tensor) for name, tensor in model.items()}
    needs = needs_of_processes(specs, num_processes=2, expert_parallel=2)
    servers = {name: Halves(*(start(specs=specs, needs=mine) for mine in needs)) for name in "ab"}
    stats = asyncio.run(WeightSync(make_source(model=model), servers, transport=transport).push(1))
    for server in servers.values():
        for process, mine in zip(server.processes, needs, strict=True):
            assert process.call("digests") == {name: tensor_digest(model[name]) for name in mine}
    assert sum(len(mine) for mine in needs) == len(model) + 1
    assert stats.num_bytes < 2 * sum(tensor.nbytes for tensor in model.values())


@pytest.mark.parametrize("transport", ["ipc", "nccl", "relay"])
def test_a_receiver_that_fails_mid_bucket_stops_nobody_for_long(transport, start, make_source):
    engines = named(start(), start(damages="layers.0.norm.weight"), start())
    sync = WeightSync(make_source(transport), engines, transport=transport, **places(transport, engines))
    started = time.monotonic()
    with pytest.raises(WeightError, match="(?s)at the transfer.*server1: WeightError: tensor 'layers.0.norm.weight'.*digest"):
        asyncio.run(sync.push(1))
    assert time.monotonic() - started < 40
    with pytest.raises(WeightError, match="without a push"):
        engines["server1"].call("finish", 1)


@pytest.mark.parametrize("transport", ["ipc", "nccl", "relay"])
def test_a_receiver_that_is_killed_in_a_push_ends_the_wait_of_all_others(transport, start, make_source):
    engines = named(start(), start(), start())

    def kill(index):
        if index == 1:
            engines["server1"].process.kill()
            engines["server1"].process.join()

    started = time.monotonic()
    with pytest.raises(WeightError, match="server1: EngineError: server process [0-9]+ died\nlost them, or waited for them:\n") as caught:
        sync = WeightSync(make_source(transport, before=kill), engines, transport=transport, **places(transport, engines))
        asyncio.run(sync.push(1))
    assert "\n* trainer: WeightError: " in str(caught.value).partition("lost them")[2]
    assert time.monotonic() - started < 40


def test_memory_that_its_process_has_closed_is_the_sign_of_a_failure_elsewhere():
    """A side that lost another one closes its memory; who comes to map it afterwards names no cause. A process that is not there may be in
    another namespace, which is one."""
    buffer = SharedBuffer()
    source = buffer.source
    buffer.close()
    bucket = Bucket(sender=0, index=0, num_bytes=1, entries=(), readers=(0,))
    with pytest.raises(WeightError, match="has none there, as it left the push, or is in another process namespace") as left:
        SharedReader().fetch(bucket, source)
    assert is_consequence(left.value)
    with pytest.raises(WeightError, match="one process namespace") as foreign:
        SharedReader().fetch(bucket, f"/proc/{2**22}/fd/7")  # the kernel's largest pid is one less
    assert not is_consequence(foreign.value)


@pytest.mark.parametrize("transport", ["ipc", "nccl", "relay"])
def test_a_receiver_that_hangs_in_a_push_is_the_one_that_is_silent_at_the_deadline(transport, start, make_source):
    engines = named(start(), start(), start())
    found = []

    def freeze(index):
        if index == 1:
            os.kill(engines["server1"].process.pid, signal.SIGSTOP)

    async def look(deadline, names):
        found.append((deadline, names))
        engines["server1"].process.kill()
        return HangError("it hangs")

    options = {"deadline_seconds": 4, "settle_seconds": 1, "on_late": look, **places(transport, engines)}
    sync = WeightSync(make_source(transport, before=freeze), engines, transport=transport, **options)
    with pytest.raises(WeightError, match=r"(?s)\* server1: did not end in time.*lost them, or waited.*\nit hangs$"):
        asyncio.run(sync.push(1))
    assert found == [("4 s at the transfer (deadlines.push_seconds)", ["server1"])]


@pytest.mark.parametrize("transport", ["nccl", "relay"])
def test_after_a_failed_push_the_next_one_connects_anew(transport, start, make_source):
    source, engines = make_source(transport), named(start(), start())
    sync = WeightSync(source, engines, transport=transport, **places(transport, engines))
    asyncio.run(sync.push(1))
    engines["server0"].call("damage", "steps")
    with pytest.raises(WeightError, match="server0: WeightError: tensor 'steps'"):
        asyncio.run(sync.push(2))
    engines["server0"].call("damage", "")
    asyncio.run(sync.push(3))
    assert source.num_listens == 2
    assert [engine.call("digests") for engine in engines.values()] == [DIGESTS, DIGESTS]


def test_ipc_a_receiver_that_never_connects_is_bounded_by_the_deadline(start, make_source):
    source, engine = make_source(), start()
    _, offer = first_push(source, readers=2)

    async def send_without_the_second():
        await asyncio.gather(source.connect(offer.address, 2), engine.connect(offer))
        source.sender._seconds = 1.0
        await source.send()

    with pytest.raises(WeightError, match="1 of 2 readers did not come within 1 s"):
        asyncio.run(send_without_the_second())


def test_nccl_a_receiver_that_never_connects_is_bounded_by_the_deadline(start, make_source):
    source, engine = make_source(), start()
    _, offer = first_push(source, "nccl", readers=2)
    source.sender._seconds = 1.0
    started = time.monotonic()

    async def connect_without_the_second():
        connecting = source.connect(offer.address, 2), engine.connect(replace(offer, seconds=1.0))
        return await asyncio.gather(*connecting, return_exceptions=True)

    mine, theirs = asyncio.run(connect_without_the_second())
    assert isinstance(mine, WeightError)
    assert "not all 2 readers and 1 senders met" in str(mine)
    assert isinstance(theirs, WeightError)
    assert "could not join the trainer" in str(theirs)
    assert time.monotonic() - started < 40


def test_nccl_a_server_on_cpu_refuses_a_trainer_that_sends_from_gpus(start, make_source):
    source = make_source()
    _, offer = first_push(source, "nccl")
    source.sender._rendezvous.tell(DEVICE_KEY, "cuda")
    with pytest.raises(WeightError, match="the trainer sends from cuda, and this server's model is on cpu"):
        start().call("connect", offer)


def test_ipc_leaves_nothing_behind_when_the_sender_is_killed(start):
    pipe, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=serve_sender, args=(theirs,), daemon=True)
    process.start()
    engine = start()
    try:
        manifest, offer = pipe.recv()
        engine.call("connect", offer)
        engine.call("begin", manifest)
        engine.call("install")
        for pid in (process.pid, engine.process.pid):
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "memfd:moerl-weights" in maps
            assert "/dev/shm" not in maps
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        engine.call("finish", 1)
        assert engine.call("digests") == DIGESTS
        engine.call("begin", replace(manifest, version=2))
        with pytest.raises(WeightError, match="trainer rank 0 left the push; bucket 0 of trainer rank 0 did not come"):
            engine.call("install")
        assert "moerl-weights" not in Path(f"/proc/{engine.process.pid}/maps").read_text()
    finally:
        process.kill()
        process.join()
        pipe.close()
        theirs.close()


LAYERS = {f"layers.{layer}.proj.weight": torch.linspace(layer, layer + 1, 6000).reshape(60, 100) for layer in range(4)}
FAULTY = "layers.2.proj.weight"
FAULTS = {
    "of another tensor": (lambda now, before: now["layers.3.proj.weight"], "tensors exchanged on the way from the trainer's ranks"),
    "of the version before": (lambda now, before: before[FAULTY], "stale bytes: they are those of version 1"),
    "of nobody": (lambda now, before: now[FAULTY].neg(), "bytes damaged on the way"),
}
"""What is packed as the tensor, of all tensors now and before; and what the error says of it."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("transport", ["ipc", "nccl", "relay", "disk"])
def test_wrong_bytes_of_a_sender_are_found_and_explained_whatever_brings_them(transport, fault, start, make_source, tmp_path):
    specs = {name: spec_of(name, tensor) for name, tensor in LAYERS.items()}
    options = {"directory": tmp_path} if transport == "disk" else {}
    source, engines = make_source(transport, model=LAYERS, **options), named(start(specs=specs), start(specs=specs))
    sync = WeightSync(source, engines, transport=transport, settle_seconds=5, **places(transport, engines))
    wrong, said = FAULTS[fault]

    async def push_with_fault():
        await sync.push(1)
        source.model = {name: tensor + 10 for name, tensor in LAYERS.items()}
        for sender in getattr(source, "senders", {0: source}).values():
            sender = getattr(sender, "sender", sender)
            sender._place = partial(place_wrong, sender._place, wrong(source.model, LAYERS))
        await sync.push(2)

    with pytest.raises(WeightError, match=rf"(?s)tensor '{FAULTY}'.*{re.escape(said)}"):
        asyncio.run(push_with_fault())
    asyncio.run(sync.push(3))
    expected = {name: tensor_digest(tensor) for name, tensor in source.model.items()}
    assert [engine.call("digests") for engine in engines.values()] == [expected, expected]


def place_wrong(place, tensor, entry, data):
    place(entry, data)
    if entry.name == FAULTY:
        box = box_of(tensor, entry.start, entry.shape)
        data[entry.offset : entry.offset + entry.num_bytes].view(box.dtype).view(box.shape).copy_(box)


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("CUDA error: peer access is not supported between these two devices\nmore", "must be peers.*weights.transport=nccl"),
        # PyTorch's, of expandable segments (ExpandableSegment::fromShared in c10/cuda/CUDACachingAllocator.cpp).
        ("pidfd_getfd: Operation not permitted", "leave expandable_segments out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_memory_of_another_gpu_is_mapped_as_the_reader_s_own_also_where_it_sees_both(monkeypatch, said, advice):
    """PyTorch compares no tensors of two GPUs: a server of several would refuse every push of which its processes hold parts."""
    mapped_on = []

    def map_on(device, *arguments):
        mapped_on.append(device)
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device}"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", map_on)
    source = ON_GPU + json.dumps(["00", 1024, 0, "00", 0, "00", False, "GPU-0"])
    with pytest.raises(WeightError, match=rf"GPU-0 has the bucket, and this process cannot map its memory on cuda:1 .*{advice}"):
        map_device(source)
    assert mapped_on == [1]
