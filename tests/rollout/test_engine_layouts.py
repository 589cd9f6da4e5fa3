"""SGLang over several processes, from rollout.layout: every process gets its part of a push, and the log-probs are transformers'."""

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_servers import ROUTES, native_config, push
from transformers import AutoModelForCausalLM

from moerl.config.server_layout import ServerLayout
from moerl.rollout.build import build_engines
from moerl.rollout.commands import native_command
from moerl.rollout.hf.routes import RouteRecorder
from moerl.types import SamplingParams, WeightError

PROMPTS = [(5, 17, 3, 3, 42, 8), (5, 17, 3, 9), (1,), (7, 7)]
CASES = {
    "tp2-ep2": (ServerLayout(gpus=2, ep=2), "ipc"),
    "dp2": (ServerLayout(gpus=2, dp=2), "ipc"),
    "two-nodes": (ServerLayout(gpus=2, gpus_per_node=1), "nccl"),
}


def left_in_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("sgl*")}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@asynccontextmanager
async def other_nodes(config, model_dir, log_dir):
    """The processes of all nodes but the first, on this host too. They end with their standard input."""
    nodes = []
    try:
        for rank in range(1, config.rollout.layout.nodes):
            with (log_dir / f"node-{rank}.log").open("wb") as log:
                command = native_command(config, model_dir, 0, node_rank=rank)
                nodes.append(await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log))
        yield
    finally:
        for node in nodes:
            node.stdin.close()
            await node.wait()


@pytest.mark.engine
@pytest.mark.parametrize("case", CASES)
def test_a_server_of_two_processes_samples_with_the_pushed_weights(run, checkpoints, tmp_path, case):
    (layout, transport), checkpoint, before = CASES[case], checkpoints["moe"], left_in_memory()
    config = native_config("sglang-moe", checkpoint, layout=replace(layout, port=free_port()))
    (engine,) = build_engines(config, checkpoint.directory, tmp_path)
    asked = SamplingParams(max_tokens=20, seed=4, returns_routes=True)
    scaled = {name: tensor * 1.05 for name, tensor in checkpoint.tensors.items()}

    async def scenario():
        async with other_nodes(config, checkpoint.directory, tmp_path):
            await engine.start()
            try:
                await push(engine, checkpoint.tensors, 1, transport=transport)
                with pytest.raises(WeightError, match="digest"):
                    await push(engine, scaled, 2, transport=transport, damaged="model.layers.1.mlp.experts.7.down_proj.weight")
                await push(engine, scaled, 3, transport=transport)
                return await asyncio.gather(*(engine.generate(prompt, asked, f"r{i}") for i, prompt in enumerate(PROMPTS)))
            finally:
                await engine.close()

    completions = run(scenario())
    assert left_in_memory() <= before
    model = AutoModelForCausalLM.from_pretrained(checkpoint.directory).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    recorder = RouteRecorder(model, ROUTES["moe"])
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad(), recorder.recording() as chosen:
            logits = model(ids[:, :-1]).logits[0, len(prompt) - 1 :]
        expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-5)
        assert np.array_equal(np.sort(completion.routes, axis=-1), np.sort(recorder.table(chosen, 1)[0], axis=-1))
        assert {span.version for span in completion.spans} == {3}
