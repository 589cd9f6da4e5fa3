"""What SGLang says that top-k and top-p left is what it sampled from, and its log-probs are of that."""

import asyncio

import numpy as np
import pytest
import torch
from tiny_servers import TURN, push
from transformers import AutoModelForCausalLM

from moerl.rollout.fleet.completion_check import check_completion
from moerl.types.completion import SamplingParams
from moerl.types.errors import EngineError


@pytest.mark.engine
@pytest.mark.matrix(turn=TURN["sglang-moe"])
def test_sglangs_log_probs_are_of_the_entries_that_it_says_were_left(run, checkpoints, native_engines):
    engine, checkpoint = native_engines("sglang-moe"), checkpoints["moe"]
    asked = [
        SamplingParams(max_tokens=12, seed=4, top_p=0.9, top_k=30, temperature=0.7, filtered=True),
        SamplingParams(max_tokens=12, seed=5, top_k=3, filtered=True),
        SamplingParams(max_tokens=12, seed=6, top_k=3),
    ]

    async def scenario():
        await engine.resume()
        await push(engine, checkpoint.tensors, 1)
        with pytest.raises(EngineError, match="top_k = 0: must be in"):
            await engine.generate((5,), SamplingParams(max_tokens=2, seed=1, top_p=0.9, filtered=True), "unbounded")
        return await asyncio.gather(*(engine.generate((5, 17, 3), each, f"r{i}") for i, each in enumerate(asked)))

    model = AutoModelForCausalLM.from_pretrained(checkpoint.directory).eval()
    for sampling, completion in zip(asked, run(scenario()), strict=True):
        check_completion(completion, sampling, request_id=completion.request_id, vocab_size=model.config.vocab_size, server="s")
        with torch.no_grad():
            logits = model(torch.tensor([[5, 17, 3, *completion.token_ids[:-1]]])).logits[0, 2:].double() / sampling.temperature
        if not sampling.filtered:
            assert completion.sets is None
            expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        else:
            left = torch.zeros(logits.shape, dtype=torch.bool)
            left[np.repeat(np.arange(len(completion.sets)), completion.sets.counts), completion.sets.ids.astype(np.int64)] = True
            expected = logits.masked_fill(~left, -torch.inf).log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            # The entries of highest probability, and no others.
            assert (logits.masked_fill(~left, torch.inf).amin(-1) >= logits.masked_fill(left, -torch.inf).amax(-1) - 1e-4).all()
            assert completion.sets.counts.max() <= sampling.top_k
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=1e-5)
