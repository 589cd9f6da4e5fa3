"""The hf engine against a plain transformers forward of the whole sequence."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from moerl.types.completion import SamplingParams

PROMPTS = [tuple(np.random.default_rng(i).integers(0, 61, size=length).tolist()) for i, length in enumerate((1, 7, 8, 9, 16, 37, 120))]


@pytest.fixture(scope="session")
def reference(checkpoints):
    """Log-probs [T, vocab] of every next token, at a temperature; weights times `scale`."""
    models = {name: AutoModelForCausalLM.from_pretrained(checkpoint.directory) for name, checkpoint in checkpoints.items()}

    @torch.no_grad()
    def logprobs(served, tokens, temperature=1.0, scale=1.0):
        name = next(name for name, checkpoint in checkpoints.items() if served.tensors is checkpoint.tensors)
        model = AutoModelForCausalLM.from_config(models[name].config)
        model.load_state_dict({key: value * scale for key, value in models[name].state_dict().items()})
        logits = model(torch.tensor([tokens])).logits[0].double()
        return torch.log_softmax(logits / temperature, dim=-1)

    return logprobs


def generate_all(run, served, prompts, **sampling):
    async def scenario():
        calls = [
            served.engine.generate(prompt, SamplingParams(**{"max_tokens": 20, "seed": i, **sampling}), f"r{i}")
            for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*calls)

    return run(scenario())


def expected_of(table, prompt, completion):
    return [table[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion.token_ids)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_whole_sequence_in_one_forward(run, served_model, reference, temperature):
    completions = generate_all(run, served_model, PROMPTS, temperature=temperature)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        table = reference(served_model, [*prompt, *completion.token_ids], temperature)
        # 1e-5 of the logits, which are divided by the temperature.
        assert completion.logprobs == pytest.approx(expected_of(table, prompt, completion), abs=1e-5 / temperature)


def test_greedy_takes_the_likeliest_token_and_reports_temperature_one(run, served_model, reference):
    for prompt, completion in zip(PROMPTS, generate_all(run, served_model, PROMPTS, temperature=0.0), strict=True):
        table = reference(served_model, [*prompt, *completion.token_ids])
        assert list(completion.token_ids) == table.argmax(dim=-1)[len(prompt) - 1 : -1].tolist()
        assert completion.logprobs == pytest.approx(expected_of(table, prompt, completion), abs=1e-5)


def test_logprobs_follow_a_push(run, served_model, reference):
    run(served_model.push(2, scale=0.9))
    for prompt, completion in zip(PROMPTS, generate_all(run, served_model, PROMPTS), strict=True):
        table = reference(served_model, [*prompt, *completion.token_ids], scale=0.9)
        assert completion.logprobs == pytest.approx(expected_of(table, prompt, completion), abs=1e-5)


def test_top_k_and_top_p_restrict_tokens_and_leave_logprobs_unrestricted(run, served_model, reference):
    top_k, top_p = generate_all(run, served_model, PROMPTS, top_k=2), generate_all(run, served_model, PROMPTS, top_p=0.5)
    for prompt, of_k, of_p in zip(PROMPTS, top_k, top_p, strict=True):
        table = reference(served_model, [*prompt, *of_k.token_ids])
        assert of_k.logprobs == pytest.approx(expected_of(table, prompt, of_k), abs=1e-5)
        ranks = (table[len(prompt) - 1 : -1] > torch.tensor(of_k.logprobs)[:, None] + 1e-5).sum(dim=-1)
        assert ranks.max() <= 1
        table = reference(served_model, [*prompt, *of_p.token_ids])[len(prompt) - 1 : -1]
        above = torch.where(table > torch.tensor(of_p.logprobs)[:, None] + 1e-5, table.exp(), 0).sum(dim=-1)
        assert above.max() < 0.5 + 1e-5


def test_weights_that_are_not_numbers_end_requests_with_a_reason_and_leave_no_trace(run, served_model):
    before = generate_all(run, served_model, PROMPTS)
    run(served_model.push(2, scale=float("nan")))
    with pytest.raises(Exception, match="not finite with weights of version 2"):
        generate_all(run, served_model, PROMPTS)
    run(served_model.engine.abort())
    run(served_model.push(1))
    after = generate_all(run, served_model, PROMPTS)
    assert [completion.token_ids for completion in after] == [completion.token_ids for completion in before]
    for old, new in zip(before, after, strict=True):
        assert new.logprobs == pytest.approx(old.logprobs, abs=1e-5)
