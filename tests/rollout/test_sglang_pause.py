"""Pauses of SGLang with the scheduler's loop for GPUs, which has always launched a batch whose tokens it has not taken."""

import asyncio

import pytest
import torch
from tiny_servers import native_engine, push, until
from transformers import AutoModelForCausalLM

from moerl.types.completion import SamplingParams

PROMPT = (5, 17, 3, 3, 42, 8)
WATCHDOG_SECONDS = 2


@pytest.mark.engine
def test_a_push_in_a_long_pause_ends_no_server_and_tokens_have_the_version_they_were_drawn_with(run, checkpoints, tmp_path):
    """SGLang's watchdog ends a server whose batch does not move for so long; of two checks only the second can."""
    checkpoint = checkpoints["dense"]
    arguments = {"disable_overlap_schedule": False, "watchdog_timeout": WATCHDOG_SECONDS}
    engine = native_engine("sglang-dense", checkpoint, tmp_path, engine_args=arguments)

    async def scenario():
        await engine.start()
        await push(engine, checkpoint.tensors, 1)
        asked = SamplingParams(max_tokens=600, seed=1, temperature=1.0)
        answer = asyncio.create_task(engine.generate(PROMPT, asked, "r"))
        await until(engine, lambda health: health.num_running == 1)
        await asyncio.sleep(0.2)
        await engine.pause("keep")
        await asyncio.sleep(4 * WATCHDOG_SECONDS)
        await push(engine, {name: tensor * 1.5 for name, tensor in checkpoint.tensors.items()}, 2)
        await engine.resume()
        return await answer

    try:
        completion = run(scenario())
    finally:
        run(engine.close())
    model = AutoModelForCausalLM.from_pretrained(checkpoint.directory).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([[*PROMPT, *completion.token_ids]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = logprobs[torch.arange(600), torch.tensor(completion.token_ids)]
    others = ((expected - torch.tensor(completion.logprobs)).abs() > 1e-4).nonzero()
    assert [span.version for span in completion.spans] == [1, 2]
    assert completion.spans[0].num_tokens == int(others[0])  # the first of the weights after the push
