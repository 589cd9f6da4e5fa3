"""The routes SGLang returns are those of a transformers forward over the same tokens."""

import asyncio

import numpy as np
import pytest
import torch
from tiny_servers import ROUTES, native_param, push
from transformers import AutoModelForCausalLM

from moerl.rollout.engines.hf.forward import RouteRecorder
from moerl.types.completion import SamplingParams


@pytest.mark.parametrize("kind", [native_param("sglang-moe"), native_param("sglang-latent")])
def test_sglangs_routes_are_those_of_transformers(run, checkpoints, native_engines, kind):
    """Also where the first layer has no experts."""
    engine, name = native_engines(kind), kind.removeprefix("sglang-")

    async def scenario():
        await engine.resume()
        await push(engine, checkpoints[name].tensors, 1)
        prompts = [(5, 17, 3, 3, 42, 8), (5, 17, 3, 9), (1,)]  # the first two share a prefix, which is cached
        asked = SamplingParams(max_tokens=20, seed=4, returns_routes=True)
        return prompts, await asyncio.gather(*(engine.generate(prompt, asked, f"r{i}") for i, prompt in enumerate(prompts)))

    model = AutoModelForCausalLM.from_pretrained(checkpoints[name].directory).eval()
    recorder = RouteRecorder(model, ROUTES[name])
    for prompt, completion in zip(*run(scenario()), strict=True):
        with torch.no_grad(), recorder.recording() as chosen:
            model(torch.tensor([[*prompt, *completion.token_ids[:-1]]]))
        expected = recorder.table(chosen, 1)[0]
        assert completion.routes.shape == expected.shape and completion.routes.dtype == np.uint8
        assert np.array_equal(np.sort(completion.routes, axis=-1), np.sort(expected, axis=-1))
