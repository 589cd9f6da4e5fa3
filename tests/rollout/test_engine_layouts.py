"""SGLang over several processes, from rollout.layout: every process gets its part of a push, and the log-probs are transformers'."""

import asyncio
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tiny_servers import ROUTES, native_config, push
from transformers import AutoModelForCausalLM

from moerl.config.server_layout import ServerLayout
from moerl.rollout.build import build_engines
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


def pids(engine):
    return [party.process.pid for party in engine.parties]


@pytest.mark.engine
@pytest.mark.parametrize("case", CASES)
def test_a_server_of_two_processes_samples_with_the_pushed_weights(run, checkpoints, tmp_path, case):
    (layout, transport), checkpoint, before = CASES[case], checkpoints["moe"], left_in_memory()
    config = native_config("sglang-moe", checkpoint, layout=layout)
    (engine,) = build_engines(config, checkpoint.directory, tmp_path)
    asked = SamplingParams(max_tokens=20, seed=4, returns_routes=True)
    scaled = {name: tensor * 1.05 for name, tensor in checkpoint.tensors.items()}

    async def scenario():
        await engine.start()
        family = [node for pid in pids(engine) for node in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
        try:
            assert len(pids(engine)) == layout.nodes
            await push(engine, checkpoint.tensors, 1, transport=transport)
            with pytest.raises(WeightError, match="digest"):
                await push(engine, scaled, 2, transport=transport, damaged="model.layers.1.mlp.experts.7.down_proj.weight")
            await push(engine, scaled, 3, transport=transport)
            return await asyncio.gather(*(engine.generate(prompt, asked, f"r{i}") for i, prompt in enumerate(PROMPTS)))
        finally:
            await engine.close()
            assert not psutil.wait_procs(family, timeout=10)[1]

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
