"""Engines over several processes, from rollout.layout: every process gets its part of a push, and the log-probs are transformers'."""

import asyncio
import re
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tiny_servers import ROUTES, as_pairs, native_config, push, values_of
from transformers import AutoModelForCausalLM

from moerl.cluster.run_secret import RunSecret
from moerl.config.schema.rollout_config import ServerLayout
from moerl.rollout.build_engines import build_engines
from moerl.rollout.engines.hf.forward import RouteRecorder
from moerl.rollout.engines.hf.hf_model import checkpoint_views
from moerl.types.completion import SamplingParams
from moerl.types.errors import EngineUnavailable, WeightError

PROMPTS = [(5, 17, 3, 3, 42, 8), (5, 17, 3, 9), (1,), (7, 7)]
CASES = {
    "tp2-ep2": ("sglang-moe", ServerLayout(gpus=2, ep=2), "ipc"),
    "dp2": ("sglang-moe", ServerLayout(gpus=2, dp=2), "ipc"),
    "two-nodes": ("sglang-moe", ServerLayout(gpus=2, gpus_per_node=1), "nccl"),
    "vllm-tp2-dense": ("vllm-dense32", ServerLayout(gpus=2), "ipc"),
    "vllm-tp2-moe": ("vllm-moe32", ServerLayout(gpus=2), "ipc"),
    "vllm-tp2-latent": ("vllm-latent512", ServerLayout(gpus=2), "nccl"),
    "vllm-two-nodes-dense": ("vllm-dense32", ServerLayout(gpus=2, gpus_per_node=1), "nccl"),
    "vllm-two-nodes-moe": ("vllm-moe32", ServerLayout(gpus=2, gpus_per_node=1), "nccl"),
    "vllm-two-nodes-dp2": ("vllm-dense32", ServerLayout(gpus=2, dp=2, gpus_per_node=1), "nccl"),
    "vllm-two-nodes-of-two": ("vllm-dense32", ServerLayout(gpus=4, gpus_per_node=2), "nccl"),
    "vllm-dp2-dense": ("vllm-dense32", ServerLayout(gpus=2, dp=2), "ipc"),
    "fp8-tp2-ep2": ("sglang-moe256", ServerLayout(gpus=2, ep=2, weights="fp8"), "ipc"),
    "fp8-latent": ("sglang-latent576", ServerLayout(weights="fp8"), "ipc"),
    "vllm-fp8-tp2": ("vllm-moe256", ServerLayout(gpus=2, weights="fp8"), "ipc"),
    "vllm-fp8-latent": ("vllm-latent576", ServerLayout(weights="fp8"), "ipc"),
}
"""vLLM has no expert parallelism on CPU."""
TURN = {"two-nodes": 0, "vllm-fp8-tp2": 0, "vllm-two-nodes-moe": 1, "fp8-tp2-ep2": 1}
"""Which every second change runs; of the others a change runs an eighth."""


def marks(case: str) -> pytest.MarkDecorator:
    return pytest.mark.matrix(turn=TURN[case]) if case in TURN else pytest.mark.matrix


def left_in_memory(engine: str) -> set[str]:
    """vLLM's files have Python's names, and those of its workers on CPU."""
    patterns = ("psm_*", "vllm_dist_*") if engine == "vllm" else ("sgl*",)
    return {path.name for pattern in patterns for path in Path("/dev/shm").glob(pattern)}


def pids(engine):
    return [each.process.pid for each in engine.watched]


@pytest.mark.engine
@pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case)) for case in CASES])
def test_a_server_in_a_layout_samples_with_the_pushed_weights(run, checkpoints, tmp_path, case):
    kind, layout, transport = CASES[case]
    engine_name, name = kind.split("-")
    before = left_in_memory(engine_name)
    checkpoint, shape = checkpoints[name], ROUTES[name] if kind == "sglang-moe" else None
    (engine,) = build_engines(native_config(kind, checkpoint, layout=layout), checkpoint.directory, tmp_path, RunSecret.new())
    asked = SamplingParams(max_tokens=20, seed=4, returns_routes=shape is not None)
    first, scaled = checkpoint.tensors, {name: tensor * 1.05 for name, tensor in checkpoint.tensors.items()}
    if layout.weights == "fp8":
        first, scaled = as_pairs(first), as_pairs(scaled, "ue8m0")

    async def scenario():
        await engine.start()
        family = [node for pid in pids(engine) for node in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
        try:
            assert len(pids(engine)) == layout.nodes
            await push(engine, first, 1, transport=transport)
            # Over the network the last of them comes to the second process before the first.
            for version, damaged in ((2, min(scaled)), (3, max(scaled)), (4, sorted(scaled)[2])):
                with pytest.raises(WeightError, match=f"{re.escape(damaged)}.*digest"):
                    await push(engine, scaled, version, transport=transport, damaged=damaged)
            await push(engine, scaled, 5, transport=transport)
            return await asyncio.gather(*(engine.generate(prompt, asked, f"r{i}") for i, prompt in enumerate(PROMPTS)))
        finally:
            await engine.close()
            assert not psutil.wait_procs(family, timeout=10)[1]

    completions = run(scenario())
    assert left_in_memory(engine_name) <= before
    model = AutoModelForCausalLM.from_pretrained(checkpoint.directory).eval()
    values = values_of(scaled)
    with torch.no_grad():
        for tensor_name, view in checkpoint_views(model).items():
            view.copy_(values[tensor_name])
    recorder = None if shape is None else RouteRecorder(model, shape)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad(), nullcontext() if recorder is None else recorder.recording() as chosen:
            logits = model(ids[:, :-1]).logits[0, len(prompt) - 1 :]
        expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-5)
        if recorder is not None:
            assert np.array_equal(np.sort(completion.routes, axis=-1), np.sort(recorder.table(chosen, 1)[0], axis=-1))
        assert {span.version for span in completion.spans} == {5}


@pytest.mark.matrix
@pytest.mark.engine
def test_two_sglang_servers_with_data_parallel_attention_start_on_one_host(run, checkpoints, tmp_path):
    config = native_config("sglang-moe", checkpoints["moe"], layout=ServerLayout(gpus=2, dp=2), num_servers=2)
    engines = build_engines(config, checkpoints["moe"].directory, tmp_path, RunSecret.new())

    async def scenario():
        try:
            await asyncio.gather(*(engine.start() for engine in engines))
            return [(await engine.health()).status for engine in engines]
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))

    assert run(scenario()) == ["stale", "stale"]


@pytest.mark.matrix
@pytest.mark.engine
def test_a_sglang_server_that_is_killed_while_its_processes_import_leaves_none(run, checkpoints, tmp_path):
    (engine,) = build_engines(native_config("sglang-moe", checkpoints["moe"]), checkpoints["moe"].directory, tmp_path, RunSecret.new())

    async def scenario():
        starting = asyncio.create_task(engine.start())
        try:
            own = await asyncio.to_thread(spawned_by_server)
            await asyncio.sleep(2)  # they have begun, and are far from the end of SGLang's imports
            own[0].parent().kill()
            assert not psutil.wait_procs(own, timeout=10)[1]
            with pytest.raises(EngineUnavailable, match="signal 9"):
                await starting
        finally:
            starting.cancel()
            await engine.close()

    run(scenario())


def spawned_by_server():
    """The processes of the one server that this process is starting, once there are two."""
    while True:
        servers = [each for each in psutil.Process().children(recursive=True) if "sglang_server" in " ".join(each.cmdline())]
        own = [each for server in servers for each in server.children() if "spawn_main" in " ".join(each.cmdline())]
        if len(own) > 1:
            return own
        time.sleep(0.2)


@pytest.mark.matrix
@pytest.mark.engine
def test_a_vllm_server_of_two_processes_that_are_killed_is_gone_and_leaves_nothing(run, checkpoints, tmp_path):
    """First a worker, just before the first request, then the server."""
    checkpoint, layout = checkpoints["dense32"], ServerLayout(gpus=2)
    before = left_in_memory("vllm")
    (engine,) = build_engines(native_config("vllm-dense32", checkpoint, layout=layout), checkpoint.directory, tmp_path, RunSecret.new())

    async def started():
        await engine.start()
        await push(engine, checkpoint.tensors, 1)
        return [psutil.Process(pids(engine)[0]), *psutil.Process(pids(engine)[0]).children(recursive=True)]

    async def scenario():
        try:
            family = await started()
            next(each for each in family if "Worker" in each.name()).kill()
            with pytest.raises(EngineUnavailable, match="the server ended"):
                await engine.generate(PROMPTS[0], SamplingParams(max_tokens=20, seed=4), "first")
            await engine.close()
            again = await started()
            again[0].kill()
            assert "signal 9" in str(await engine.ended())
            assert not psutil.wait_procs([*family, *again], timeout=10)[1]
        finally:
            await engine.close()

    run(scenario())
    assert {name for name in left_in_memory("vllm") if name.startswith("vllm_dist_")} <= before


@pytest.mark.matrix
@pytest.mark.engine
def test_a_vllm_server_that_loses_the_coordinator_of_its_groups_ends(run, checkpoints, tmp_path):
    """Groups that wait for each other's experts would never begin a request again; vLLM watches its engines alone."""
    checkpoint, layout = checkpoints["dense32"], ServerLayout(gpus=2, dp=2)
    (engine,) = build_engines(native_config("vllm-dense32", checkpoint, layout=layout), checkpoint.directory, tmp_path, RunSecret.new())

    async def scenario():
        try:
            await engine.start()
            server = psutil.Process(pids(engine)[0])
            family = [server, *server.children(recursive=True)]
            (coordinator,) = [each for each in family if "Coordinator" in " ".join(each.cmdline())]
            coordinator.kill()
            async with asyncio.timeout(30):
                death = str(await engine.ended())
            assert "with exit code 1" in death and "coordinator" in death
            assert not psutil.wait_procs(family, timeout=10)[1]
        finally:
            await engine.close()

    run(scenario())


@pytest.mark.matrix("second node")  # not in the group of the other one that starts vLLM three times, on two nodes
@pytest.mark.engine
def test_a_vllm_server_that_loses_a_process_of_its_second_node_ends_whole_and_comes_back(run, checkpoints, tmp_path):
    """First moerl's process, which vLLM's worker there does not outlive, then the worker, whose end moerl's process reports."""
    checkpoint, layout = checkpoints["dense32"], ServerLayout(gpus=2, gpus_per_node=1)
    (engine,) = build_engines(native_config("vllm-dense32", checkpoint, layout=layout), checkpoint.directory, tmp_path, RunSecret.new())

    def family():
        return [[psutil.Process(pid), *psutil.Process(pid).children(recursive=True)] for pid in pids(engine)]

    async def loss(victim, processes):
        victim.kill()
        death = str(await engine.ended())
        await engine.close()
        assert not psutil.wait_procs([*processes[0], *processes[1]], timeout=10)[1]
        assert "the process on node 1 of its 2 nodes (127.0.0.1) ended first" in death and "rollout-0-node1.log" in death
        return death

    async def scenario():
        await engine.start()
        first, second = before = family()
        try:
            assert len(first) > 1 and len(second) > 1, "vLLM has processes of its own on both nodes"
            assert "signal 9" in await loss(second[0], before)
            await engine.start()
            _, second = again = family()
            await push(engine, checkpoint.tensors, 1, transport="nccl")
            completion = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=20, seed=4), "after")
            assert {span.version for span in completion.spans} == {1}
            (worker,) = [each for each in second if "resource_tracker" not in " ".join(each.cmdline()) and each != second[0]]
            death = await loss(worker, again)
            assert "with exit code 1" in death and "VllmWorker-1 on this node ended first, with exit code -9" in death
            await engine.start()
            first, _ = family()
            (worker,) = [each for each in first if "VllmWorker" in each.name() or "Worker" in " ".join(each.cmdline())]
            worker.kill()
            with pytest.raises(WeightError, match="ended"):
                await push(engine, checkpoint.tensors, 1, transport="nccl")
            assert "ended" in str(await engine.ended())
        finally:
            await engine.close()

    run(scenario())
