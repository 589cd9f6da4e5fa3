"""Canary runs over engines that sample from, and a trainer that scores with, the same small bigram model."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from moerl.canary import ask_canary, canary_batch, compare_canary
from moerl.types.batch import TrainBatch
from moerl.types.completion import Completion, VersionSpan
from moerl.types.errors import WeightError

VOCABULARY = 11
PROMPTS = ((1, 2, 3), (4,), (5, 6))


def bigram_logprobs(temperature, *, shift=0.0):
    logits = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)) / temperature
    logits[:, 0] += shift
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


class BigramEngine:
    """Serves completions of a fixed bigram table; everything a canary needs of an engine."""

    def __init__(self, name, *, shift=0.0, version=3, **changes):
        self.name, self.shift, self.version, self.changes = name, shift, version, changes
        self.sampling = []

    async def generate(self, prompt_ids, sampling, request_id):
        self.sampling.append(sampling)
        table = bigram_logprobs(sampling.temperature, shift=self.shift)
        random, tokens, logprobs = np.random.default_rng(sampling.seed), [prompt_ids[-1]], []
        for _ in range(sampling.max_tokens):
            row = table[tokens[-1]]
            tokens.append(int(random.choice(VOCABULARY, p=np.exp(row))))
            logprobs.append(float(row[tokens[-1]]))
        completion = Completion(
            request_id=request_id,
            token_ids=tuple(tokens[1:]),
            logprobs=tuple(logprobs),
            spans=(VersionSpan(version=self.version, num_tokens=sampling.max_tokens),),
            finish_reason="length",
        )
        return replace(completion, **self.changes)


def trainer(temperature=1.0):
    async def logprobs(batch: TrainBatch) -> np.ndarray:
        scores_T = np.zeros(len(batch.token_ids_T), dtype=np.float32)
        scores_T[1:] = bigram_logprobs(temperature)[batch.token_ids_T[:-1], batch.token_ids_T[1:]]
        scores_T[batch.offsets[:-1]] = 0
        return scores_T

    return logprobs


def canary(engines, logprobs=None, *, limit=1e-4, **changes):
    async def run():
        asked = await ask_canary(engines, PROMPTS, **({"max_tokens": 5, "version": 3, "vocab_size": VOCABULARY} | changes))
        return compare_canary(asked, await (trainer() if logprobs is None else logprobs)(asked.batch), limit=limit)

    return asyncio.run(run())


def test_equal_models_pass_and_every_response_token_counts():
    result = canary([BigramEngine("a"), BigramEngine("b")])
    assert 0 <= result.mean <= result.max < 1e-5
    assert {name: engine.num_tokens for name, engine in result.engines.items()} == {"a": 15, "b": 15}


def test_the_run_s_temperature_reaches_the_engine():
    engine = BigramEngine("a")
    assert canary([engine], trainer(0.5), temperature=0.5, seed=40).max < 1e-5
    assert [sampling.seed for sampling in engine.sampling] == [40, 41, 42]


def test_another_temperature_on_one_side_fails():
    with pytest.raises(WeightError, match="mismatch_limit = 0.0001"):
        canary([BigramEngine("a")], trainer(0.5))


def test_only_the_differing_engine_is_named_with_its_worst_token():
    with pytest.raises(WeightError) as caught:
        canary([BigramEngine("good"), BigramEngine("stale:8000", shift=2.0)])
    message = str(caught.value)
    assert "* stale:8000: mean " in message
    assert "over 15 tokens; worst at prompt " in message
    assert "* good" not in message
    assert "likely causes" in message


def test_the_worst_token_is_the_one_that_differs():
    async def one_wrong(batch):
        scores_T = await trainer()(batch)
        scores_T[batch.offsets[4] + 3] -= 2.0
        return scores_T

    with pytest.raises(WeightError, match=r"\* b: mean 0.133, max 2 over 15 tokens; worst at prompt 1, position 3, token"):
        canary([BigramEngine("a"), BigramEngine("b")], one_wrong)


def test_differences_on_prompt_tokens_do_not_count():
    async def prompts_differ(batch):
        return np.where(batch.response_mask_T, await trainer()(batch), 99.0)

    assert canary([BigramEngine("a")], prompts_differ).max < 1e-5


def test_a_log_prob_that_is_not_a_number_fails():
    async def broken(batch):
        scores_T = await trainer()(batch)
        scores_T[batch.offsets[1] + 2] = np.nan
        return scores_T

    with pytest.raises(WeightError, match="worst at prompt 1, position 2, token .*: trainer nan"):
        canary([BigramEngine("a")], broken)


def test_within_the_limit_the_result_reports_the_difference():
    async def shifted(batch):
        return await trainer()(batch) + np.float32(0.01)

    result = canary([BigramEngine("a")], shifted, limit=0.02)
    assert result.mean == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "canary on a: sampled with weights of version 2, must be 3"),
        ({"spans": (VersionSpan(version=3, num_tokens=4), VersionSpan(version=2, num_tokens=1))}, "weights of version 2, must be 3"),
        ({"finish_reason": "abort"}, "ended with 'abort' after 5 tokens"),
        ({"token_ids": (), "logprobs": (), "spans": ()}, "after 0 tokens"),
        ({"logprobs": (0.0,)}, "1 log-probs: must be as many as tokens, 5"),
    ],
)
def test_a_completion_that_cannot_be_compared_is_refused(changes, said):
    with pytest.raises(WeightError, match=said):
        canary([BigramEngine("a", **changes)])


def test_misaligned_trainer_log_probs_are_refused():
    async def short(batch):
        return (await trainer()(batch))[:-1]

    with pytest.raises(WeightError, match="returned shape"):
        canary([BigramEngine("a")], short)


def test_without_engines_or_prompts_there_is_nothing_to_compare():
    with pytest.raises(WeightError, match="0 engines and 3 prompts"):
        canary([])


def test_the_batch_lays_prompts_and_responses_end_to_end():
    completion = Completion(request_id="r", token_ids=(7, 8), logprobs=(-1.0, -2.0), spans=(), finish_reason="stop")
    batch = canary_batch([((1, 2, 3), completion), ((4,), completion)])
    assert batch.token_ids_T.tolist() == [1, 2, 3, 7, 8, 4, 7, 8]
    assert batch.response_mask_T.tolist() == [False, False, False, True, True, False, True, True]
    assert batch.rollout_logprobs_T.tolist() == [0, 0, 0, -1, -2, 0, -1, -2]
    assert batch.offsets.tolist() == [0, 5, 8]
    assert (batch.token_ids_T.dtype, batch.rollout_logprobs_T.dtype, batch.offsets.dtype) == (np.int64, np.float32, np.int64)


def test_an_answer_that_cannot_be_is_the_engines_fault_and_not_shown_to_the_trainer():
    garbage = BigramEngine("b:8000", token_ids=(VOCABULARY, 0, 0, 0, 0))
    with pytest.raises(WeightError, match=rf"b:8000: .*token {VOCABULARY}: must be in the model's vocabulary"):
        canary([BigramEngine("a"), garbage], logprobs=None)
