"""Output layer and log-probs in chunks equal those of whole logits, in every dtype and for every cut of the vocabulary, in the memory of
three chunks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_ranks import run_ranks
from logprob_jobs import Case, HeadCase, chunked, gradients_twice, of_megatron, peak_bytes, through_the_head

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
def test_logits_far_below_all_others_have_no_part_in_the_entropy(tp):
    """On four ranks the first holds nothing else, so many columns that their sums must not overflow before they are scaled to 0."""
    case = Case(tp=tp, num_dead=30, dtype="float64")
    values = run_ranks(chunked, tp, case)
    assert (values.logprobs_T < -1e29).any()  # a label among them
    assert_close(values, case, atol=1e-12)
    in_float32 = run_ranks(chunked, tp, replace(case, dtype="float32"))
    np.testing.assert_allclose(in_float32.entropy_T, values.entropy_T, atol=1e-5)
    np.testing.assert_allclose(in_float32.logprobs_T, values.logprobs_T, atol=1e-5, rtol=1e-6)


def of_whole_logits(case):
    """As `through_the_head`, by autograd in float64."""
    states_TH, weight_VH, labels_T, weight_T = case.whole()
    states_TH, weight_VH = (each.double().requires_grad_() for each in (states_TH, weight_VH))
    table_TV = (states_TH @ weight_VH.t() / 0.7).log_softmax(-1)
    entropy_T = -(table_TV.exp() * table_TV).sum(-1)
    logprobs = [table_TV.gather(1, labels[:, None])[:, 0] for labels in (labels_T, labels_T.flip(0))]
    sum(((logp + 0.5 * entropy_T) * weight_T).sum() for logp in logprobs).backward()
    return tuple(each.detach().numpy() for each in (logprobs[0], entropy_T, states_TH.grad, weight_VH.grad))


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("dtype", "atol"), [("float64", 1e-12), ("float32", 1e-6), ("bfloat16", 0.05)])
def test_states_and_weight_have_the_gradients_of_whole_logits(dtype, atol, tp, accumulates):
    """Also where the weight's gradient is added to that of other micro-batches, in float32, and where two uses share the weight."""
    case = HeadCase(tp=tp, dtype=dtype, accumulates=accumulates)
    for found, expected in zip(run_ranks(through_the_head, tp, case), of_whole_logits(case), strict=True):
        np.testing.assert_allclose(found, expected, atol=atol, rtol={"float64": 0, "float32": 1e-6, "bfloat16": 0.01}[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("chunk_tokens", [16, 5])
def test_logits_that_are_left_from_the_forward_pass_give_the_bits_of_logits_made_anew(chunk_tokens, dtype):
    """One chunk, in the same order; of several, the order in which the weight's gradient is summed differs."""
    case = Case(dtype=dtype, num_tokens=16, chunk_tokens=chunk_tokens)
    (states, weight), (states_anew, weight_anew) = run_ranks(gradients_twice, 1, case)
    assert torch.equal(states, states_anew)
    assert torch.equal(weight, weight_anew) or chunk_tokens < 16
    torch.testing.assert_close(weight, weight_anew)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_peak_of_memory_is_three_chunks(dtype):
    """Logits in the model's dtype and, if that is narrow, in float32, and what is summed of them; backward their gradient."""
    case = Case(dtype=dtype, num_tokens=512, vocab_size=4096, chunk_tokens=32)
    forward, backward = run_ranks(peak_bytes, 1, case)
    narrow = {"float64": 8, "float32": 4, "bfloat16": 2}[dtype] * case.chunk_tokens * case.vocab_size
    wide = max(narrow, 4 * case.chunk_tokens * case.vocab_size)
    scalars = 256 * case.num_tokens
    both = narrow + wide if dtype == "bfloat16" else wide
    assert both < forward <= both + wide + scalars
    assert both < backward <= both + 2 * wide + scalars


def test_the_memory_test_sees_whole_logits():
    """With all tokens in one chunk the bound of a smaller chunk is exceeded, so the count does count."""
    case = Case(num_tokens=512, vocab_size=4096, chunk_tokens=512)
    forward, _ = run_ranks(peak_bytes, 1, case)
    assert forward > 3 * 32 * case.vocab_size * 4 + 256 * case.num_tokens


def test_pytorch_has_the_product_that_a_gpu_takes():
    """Of bfloat16 matrices in float32, which it computes on CUDA alone (_WeightGradient)."""
    assert "dtype" in torch.ops.aten.mm.overloads()
