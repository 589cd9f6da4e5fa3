"""Chunked log-probs equal those of whole logits, in every dtype and for every cut of the vocabulary, in the memory of two chunks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_ranks import run_ranks
from logprob_jobs import Case, chunked, of_megatron, peak_bytes

CASES = {
    "one rank": Case(),
    "odd vocabulary on two ranks": Case(tp=2, temperature=0.7),
    "a rank that holds only padding": Case(tp=4, vocab_size=5),
    "chunk longer than the row": Case(chunk_tokens=1000, temperature=1.5),
    "one token at a time": Case(tp=2, chunk_tokens=1),
    "one token": Case(num_tokens=2, chunk_tokens=1),
}


def exact(case):
    """Log-probs, entropy, and the gradient of their weighted sum, by autograd over the whole table in float64."""
    logits_TV, labels_T, weight_T = case.whole()
    logits_TV = logits_TV.double().requires_grad_()
    table_TV = (logits_TV / case.temperature).log_softmax(-1)
    if (sets := case.sets()) is not None:
        is_left_TV = torch.tensor(sets.counts == 0)[:, None].expand_as(logits_TV).clone()
        is_left_TV[np.repeat(np.arange(len(sets)), sets.counts), sets.ids] = True
        table_TV = (logits_TV / case.temperature).masked_fill(~is_left_TV, -torch.inf).log_softmax(-1)
    logprobs_T = table_TV.gather(1, labels_T[:, None])[:, 0]
    entropy_T = -(table_TV.exp() * table_TV.clamp(min=-1e30)).sum(-1)
    ((logprobs_T * weight_T).sum() + case.entropy_weight * (entropy_T * weight_T.flip(0)).sum()).backward()
    return logprobs_T.detach().numpy(), entropy_T.detach().numpy(), logits_TV.grad.numpy()


def assert_close(values, case, atol):
    logprobs_T, entropy_T, gradient_TV = exact(case)
    np.testing.assert_allclose(values.logprobs_T, logprobs_T, atol=atol, rtol=0)
    np.testing.assert_allclose(values.entropy_T, entropy_T, atol=atol, rtol=0)
    np.testing.assert_allclose(values.gradient_TV[:, : case.vocab_size], gradient_TV, atol=atol, rtol=0)
    assert not values.gradient_TV[:, case.vocab_size :].any()


@pytest.mark.parametrize("name", CASES)
def test_float64_stays_float64(name):
    case = replace(CASES[name], dtype="float64")
    values = run_ranks(chunked, case.tp, case)
    assert values.dtypes == ("float64", "float64", "float64")
    assert_close(values, case, atol=1e-12)


@pytest.mark.parametrize("num_left", [0, 4])
@pytest.mark.parametrize("name", CASES)
def test_an_entropy_term_and_what_sampling_left_have_their_gradients(name, num_left):
    case = replace(CASES[name], dtype="float64", entropy_weight=0.7, num_left=num_left)
    assert_close(run_ranks(chunked, case.tp, case), case, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_float32_equals_megatrons_cross_entropy(name):
    case = replace(CASES[name], spread=1.0)
    values, expected = run_ranks(chunked, case.tp, case), run_ranks(of_megatron, case.tp, case)
    assert values.dtypes == ("float32", "float32", "float32")
    for column in ("logprobs_T", "entropy_T", "gradient_TV"):
        np.testing.assert_allclose(getattr(values, column), getattr(expected, column), atol=1e-6, rtol=1e-6, err_msg=column)


def test_bfloat16_logits_are_computed_in_float32_and_get_a_bfloat16_gradient():
    case = Case(tp=2, dtype="bfloat16")
    values = run_ranks(chunked, 2, case)
    assert values.dtypes == ("float32", "float32", "bfloat16")
    logprobs_T, entropy_T, gradient_TV = exact(case)
    np.testing.assert_allclose(values.logprobs_T, logprobs_T, atol=3e-6, rtol=0)
    np.testing.assert_allclose(values.entropy_T, entropy_T, atol=3e-6, rtol=0)
    np.testing.assert_allclose(values.gradient_TV[:, : case.vocab_size], gradient_TV, atol=1e-5, rtol=2**-8)


def test_logits_far_apart_neither_overflow_nor_lose_the_entropy():
    case = Case(tp=2, spread=300.0)
    values = run_ranks(chunked, 2, case)
    logprobs_T, entropy_T, _ = exact(case)
    np.testing.assert_allclose(values.logprobs_T, logprobs_T, rtol=1e-6, atol=1e-4)
    np.testing.assert_allclose(values.entropy_T, entropy_T, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tp", [1, 4])
def test_logits_of_minus_infinity_have_probability_zero_and_no_part_in_the_entropy(tp):
    """On four ranks the first holds nothing else, so many columns that their sums must not overflow before they are scaled to 0."""
    case = Case(tp=tp, num_dead=30, dtype="float64")
    values = run_ranks(chunked, tp, case)
    assert np.isneginf(values.logprobs_T).any()  # a label among them
    assert_close(values, case, atol=1e-12)
    in_float32 = run_ranks(chunked, tp, replace(case, dtype="float32"))
    np.testing.assert_allclose(in_float32.entropy_T, values.entropy_T, atol=1e-5)
    np.testing.assert_allclose(in_float32.logprobs_T, values.logprobs_T, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_peak_of_memory_is_two_chunks_and_the_gradient(dtype):
    case = Case(dtype=dtype, num_tokens=512, vocab_size=4096, chunk_tokens=32)
    forward, backward = run_ranks(peak_bytes, 1, case)
    chunk = case.chunk_tokens * case.vocab_size * (8 if dtype == "float64" else 4)
    scalars = 128 * case.num_tokens
    gradient = case.num_tokens * case.vocab_size * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    assert chunk < forward <= 2 * chunk + scalars
    assert gradient < backward <= gradient + 2 * chunk + scalars


def test_the_memory_test_sees_whole_logits():
    """With all tokens in one chunk the bound of a smaller chunk is exceeded, so the count does count."""
    case = Case(num_tokens=512, vocab_size=4096, chunk_tokens=512)
    forward, _ = run_ranks(peak_bytes, 1, case)
    assert forward > 2 * 32 * case.vocab_size * 4 + 128 * case.num_tokens
