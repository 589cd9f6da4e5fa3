"""How servers of other engines refuse to start, before they load a model."""

import asyncio
import os
import re
import socket
from types import SimpleNamespace

import psutil
import pytest
import torch
from family_servers import REFUSED
from tiny_servers import native_engine, native_param

from moerl.rollout.engines.vllm import vllm_core
from moerl.rollout.engines.vllm.vllm_core import CacheLoads, VLLMCore
from moerl.types.errors import EngineError


@pytest.mark.parametrize("kind", [native_param("sglang-moe"), native_param("vllm-moe32")])
def test_a_port_in_use_is_refused_with_what_to_do(run, checkpoints, tmp_path, kind):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = native_engine(kind, checkpoints[kind.split("-")[1]], tmp_path, port=port)
        with pytest.raises(EngineError, match=rf"rollout.port = {port}: port is in use on 127.0.0.1; .* Set rollout.port=0"):
            run(engine.start())


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="the sizes are those of kernels for CPU")
def test_a_model_and_arguments_that_vllm_cannot_take_are_refused_together(run, checkpoints, tmp_path):
    engine = native_engine("vllm-moe", checkpoints["moe"], tmp_path, engine_args={"max_num_seq": 4})
    with pytest.raises(EngineError, match=r"(?s)rollout\.engine_args\.max_num_seq = 4.*head_dim = 16"):
        run(engine.start())


@pytest.mark.engine
def test_a_cache_that_has_no_room_for_one_whole_request_of_sglang_is_refused(run, checkpoints, tmp_path):
    engine = native_engine("sglang-dense", checkpoints["dense"], tmp_path, engine_args={"max_total_tokens": 600})
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(EngineError, match=r"model\.max_context = 640: no room in SGLang's cache; lower it"):
        run(engine.start())
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.engine
@pytest.mark.matrix
@pytest.mark.skipif(torch.cuda.is_available(), reason="it is the build for CPU that has not all of them")
@pytest.mark.parametrize(("engine", "family"), REFUSED)
def test_a_family_that_an_engine_does_not_serve_on_cpu_is_refused_in_its_own_words(run, checkpoints, tmp_path, engine, family):
    server = native_engine(f"{engine}-{family}", checkpoints[family], tmp_path)
    with pytest.raises(EngineError, match=re.escape(REFUSED[engine, family])):
        run(server.start())


class RecordingVLLM:
    """Notes how it is asked to sleep and wake."""

    vllm_config = SimpleNamespace(speculative_config=None)

    def __init__(self):
        self.calls = []

    async def sleep(self, level):
        self.calls.append(f"sleep level {level}")

    async def wake_up(self, tags):
        self.calls.append(f"wake {tags}")

    async def pause_generation(self, mode):
        self.calls.append(f"pause {mode}")

    async def release_kv_cache_memory(self):
        self.calls.append("release caches")

    async def collective_rpc(self, verb, args=()):
        self.calls.append(verb)


def test_vllm_drops_weights_that_a_push_brings_again_and_gives_caches_back_alone():
    async def scenario():
        engine = RecordingVLLM()
        core = VLLMCore(engine=engine, needs=(), loads=CacheLoads(), sleeps=True)
        await core.sleep(("weights", "cache"))
        await core.wake(("weights",))
        await core.wake(("cache",))
        await core.sleep(("cache",))
        return engine.calls

    assert asyncio.run(scenario()) == [
        "before_sleep", "sleep level 2", "wake ['weights']", "after_sleep", "wake ['kv_cache']", "pause abort", "release caches"
    ]  # fmt: skip


def test_vllm_without_sleep_mode_lets_its_processes_drop_the_weights():
    engine = RecordingVLLM()
    assert asyncio.run(VLLMCore(engine=engine, needs=(), loads=CacheLoads(), sleeps=False).sleep(("weights", "cache"))) == 0
    assert engine.calls == ["before_sleep"]


class EndingVLLM:
    """Its processes end when the test says so; and when it is shut down, as vLLM's AsyncLLM has it."""

    def __init__(self):
        self.errored, self.dead_error = False, RuntimeError("its processes ended")
        self.coordinator = SimpleNamespace(proc=SimpleNamespace(is_alive=lambda: True, exitcode=None))
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(coordinator=self.coordinator))

    def shutdown(self):
        self.errored = True


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("which", ["engine", "coordinator"])
def test_a_server_ends_with_vllms_processes_also_when_nothing_asks_it(monkeypatch, closes, which):
    """vLLM leaves a call that it had begun without an end, and a server that is idle would go on to answer probes."""
    ended = []
    monkeypatch.setattr(vllm_core, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(vllm_core.os, "_exit", ended.append)

    async def scenario():
        engine = EndingVLLM()
        core = VLLMCore(engine=engine, needs=(), loads=CacheLoads(), sleeps=False)
        core.watch()
        await asyncio.sleep(0.1)
        assert ended == []
        if closes:
            core.close()
        if which == "engine":
            engine.errored = True
        else:
            engine.coordinator.proc.is_alive = lambda: False
        await asyncio.sleep(0.1)

    asyncio.run(scenario())
    assert (1 in ended) is not closes


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        pytest.param("sglang-moe", "sglang::detokenizer", marks=[pytest.mark.engine, pytest.mark.matrix]),
        pytest.param("vllm-moe32", "VLLM::EngineCore", marks=[pytest.mark.engine, pytest.mark.matrix]),
    ],
)
def test_an_idle_server_ends_soon_after_a_process_of_its_engine(run, checkpoints, tmp_path, kind, part):
    engine = native_engine(kind, checkpoints[kind.split("-")[1]], tmp_path)

    async def scenario():
        await engine.start()
        try:
            children = psutil.Process(engine.watched[0].process.pid).children(recursive=True)
            next(child for child in children if part in " ".join(child.cmdline())).kill()
            async with asyncio.timeout(15):
                return str(await engine.ended())
        finally:
            await engine.close()

    assert "the server ended" in run(scenario())
