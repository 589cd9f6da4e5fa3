"""Tokens from logits: frequencies, restrictions, and independence of rows."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moerl.rollout.engines.hf.sampling import Draws, sample, uniforms
from moerl.rollout.engines.hf.scheduler import SlotTable
from moerl.rollout.server.contract import runs_of
from moerl.types.completion import SamplingParams, VersionSpan

LOGITS = torch.tensor([0.3, -1.2, 2.0, 0.3, -4.0, 1.1])


def draws(uniform, *, temperature=1.0, top_k=0, top_p=1.0, filtered=False):
    n = len(uniform)
    return Draws(
        temperature=np.full(n, temperature), top_k=np.full(n, top_k), top_p=np.full(n, top_p), filtered=np.full(n, filtered),
        uniform=np.asarray(uniform, dtype=np.float64),
    )  # fmt: skip


def frequencies(**settings):
    """Over uniforms that fill [0, 1) evenly: the exact probabilities up to 1 / n."""
    n = 20_000
    tokens, _, _ = sample(LOGITS.expand(n, -1), draws((np.arange(n) + 0.5) / n, **settings))
    return np.bincount(tokens, minlength=len(LOGITS)) / n


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_come_with_their_probabilities(temperature):
    expected = torch.softmax(LOGITS.double() / temperature, dim=-1).numpy()
    assert frequencies(temperature=temperature) == pytest.approx(expected, abs=1e-4)


def test_top_k_keeps_the_k_likeliest_in_proportion():
    p = torch.softmax(LOGITS.double(), dim=-1).numpy()
    kept = np.array([0, 0, p[2], 0, 0, p[5]])
    assert frequencies(top_k=2) == pytest.approx(kept / kept.sum(), abs=1e-4)


def test_top_p_keeps_the_smallest_set_that_holds_it():
    p = torch.softmax(LOGITS.double(), dim=-1).numpy()
    assert p[2] < 0.7 < p[2] + p[5]
    kept = np.array([0, 0, p[2], 0, 0, p[5]])
    assert frequencies(top_p=0.7) == pytest.approx(kept / kept.sum(), abs=1e-4)
    assert frequencies(top_p=1e-9) == pytest.approx([0, 0, 1, 0, 0, 0])


def test_temperature_zero_takes_the_largest_with_its_logprob_at_temperature_one():
    tokens, logprobs, _ = sample(LOGITS[None], draws([0.99], temperature=0.0))
    assert tokens.tolist() == [2]
    assert logprobs == pytest.approx(torch.log_softmax(LOGITS.double(), dim=-1)[2].item(), abs=1e-6)


@given(
    logits=st.lists(st.floats(-50, 50, width=32, allow_subnormal=False) | st.just(-np.inf), min_size=2, max_size=9).filter(
        lambda row: max(row) > -np.inf
    ),
    uniform=st.floats(0, 1, exclude_max=True),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.01, 1),
)
def test_a_token_of_probability_zero_is_never_drawn(logits, uniform, top_k, top_p):
    tokens, logprobs, _ = sample(torch.tensor([logits]), draws([uniform], top_k=top_k, top_p=top_p))
    assert np.isfinite(logprobs).all()
    better = sum(logit > logits[tokens[0]] for logit in logits)
    assert top_k == 0 or better < top_k


@given(
    seed=st.integers(0, 99), top_k=st.integers(0, 9), top_p=st.floats(0.01, 1), temperature=st.floats(0.3, 3), uniform=st.floats(0, 0.99)
)
def test_filtered_log_probs_are_of_what_was_left_and_come_with_it(seed, top_k, top_p, temperature, uniform):
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed)) * 3
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    tokens, logprobs, sets = sample(logits, draws([uniform], filtered=True, **settings))
    assert sample(logits, draws([uniform], **settings))[0].tolist() == tokens.tolist()
    p = torch.softmax(logits[0].double() / temperature, dim=-1).numpy()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    some = [place for place in range(12) if (place < top_k or top_k == 0) and (before[place] < top_p - 1e-6 or place == 0)]
    left = {int(order[place]) for place in some}
    at_the_edge = {int(entry) for place, entry in enumerate(order) if abs(before[place] - top_p) <= 1e-6}
    found = set(sets.ids.tolist())
    assert left <= found <= left | at_the_edge
    assert sets.hold(tokens).all()
    assert logprobs[0] == pytest.approx(np.log(p[tokens[0]] / p[sorted(found)].sum()), abs=1e-5)


def test_the_largest_uniform_draws_the_last_possible_token():
    tokens, _, _ = sample(torch.tensor([[0.0, 0.0, -np.inf]]), draws([np.nextafter(1, 0)]))
    assert tokens.tolist() == [1]


def test_a_row_has_the_same_bits_alone_and_among_others():
    torch.manual_seed(0)
    logits = torch.randn(33, 1001) * 4
    mixed = Draws(
        temperature=np.linspace(0.5, 2, 33), top_k=np.arange(33) % 5 * 7, top_p=np.linspace(0.3, 1, 33), filtered=np.arange(33) % 2 == 0,
        uniform=uniforms(3, 33),
    )  # fmt: skip
    tokens, logprobs, sets = sample(logits, mixed)
    for row in range(33):
        one = Draws(**{name: getattr(mixed, name)[row : row + 1] for name in Draws.__slots__})
        token, logprob, one_set = sample(logits[row : row + 1], one)
        assert (token[0], logprob[0]) == (tokens[row], logprobs[row])
        assert (one_set is None) == (row % 2 == 1)
        assert one_set is None or one_set.ids.tolist() == sets.take(np.array([row])).ids.tolist()


def test_uniforms_of_a_seed_do_not_depend_on_their_number():
    assert np.array_equal(uniforms(12, 5), uniforms(12, 500)[:5])
    assert not np.array_equal(uniforms(12, 5), uniforms(13, 5))


@given(st.lists(st.integers(0, 3), max_size=20))
def test_spans_are_the_runs_of_the_versions(versions):
    spans = runs_of(versions)
    assert [span.version for span in spans for _ in range(span.num_tokens)] == versions
    assert all(a.version != b.version for a, b in pairwise(spans))


def test_a_slot_taken_again_remembers_nothing():
    table = SlotTable(2, 16, 10)
    slots = np.array([1])
    table.take(1, 3, SamplingParams(max_tokens=4, seed=1, stop_token_ids=(7,)))
    assert table.record(slots, np.array([5]), np.array([-1.0]), version=4).tolist() == [False]
    assert table.record(slots, np.array([7]), np.array([-2.0]), version=5).tolist() == [True]
    first = table.completion(1, "r", aborted=False)
    assert (first.token_ids, first.logprobs, first.finish_reason) == ((5, 7), (-1.0, -2.0), "stop")
    assert first.spans == (VersionSpan(version=4, num_tokens=1), VersionSpan(version=5, num_tokens=1))
    table.take(1, 3, SamplingParams(max_tokens=1, seed=1))
    assert table.record(slots, np.array([7]), np.array([-3.0]), version=5).tolist() == [True]
    assert table.completion(1, "r", aborted=False).finish_reason == "length"
