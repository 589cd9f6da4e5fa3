"""What top-k and top-p left: token by token, over HTTP, over the parts of a completion, and refused where it cannot be."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.rollout.fleet.completion_check import check_completion
from moerl.rollout.fleet.continuation import joined
from moerl.rollout.server import wire
from moerl.rollout.server.limits import Limits
from moerl.types.completion import Completion, SamplingParams, VersionSpan
from moerl.types.errors import EngineUnsound
from moerl.types.kept_vocabulary import KeptVocabulary

ROWS = st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), max_size=6)


def sets_of(rows):
    return KeptVocabulary.of_counts(
        np.array([entry for row in rows for entry in row]), np.array([len(row) for row in rows], dtype=np.int64)
    )


def rows_of(sets):
    return [sets.ids[a:b].tolist() for a, b in zip(sets.offsets[:-1], sets.offsets[1:], strict=True)]


@given(ROWS, ROWS, st.data())
def test_sets_are_joined_and_taken_token_by_token(first, second, data):
    both = KeptVocabulary.joined([sets_of(first), sets_of(second)])
    assert rows_of(both) == first + second
    chosen = data.draw(st.lists(st.integers(-1, len(both) - 1), max_size=8))
    assert rows_of(both.take(np.array(chosen, dtype=np.int64))) == [[] if token < 0 else (first + second)[token] for token in chosen]
    tokens = data.draw(st.lists(st.integers(0, 9), min_size=len(both), max_size=len(both)))
    expected = [not row or token in row for row, token in zip(first + second, tokens, strict=True)]
    assert both.hold(np.array(tokens, dtype=np.int64)).tolist() == expected


def completion(token_ids, rows):
    return Completion(
        request_id="r",
        token_ids=tuple(token_ids),
        logprobs=(-0.5,) * len(token_ids),
        spans=(VersionSpan(version=0, num_tokens=len(token_ids)),),
        finish_reason="length",
        sets=None if rows is None else sets_of(rows),
    )


SAMPLING = SamplingParams(max_tokens=2, seed=0, top_p=0.9, filtered=True)


def test_they_cross_http_and_a_damaged_answer_does_not():
    content = wire.dump_completion(completion([3, 4], [[3, 1], [4]]))
    assert len(content) < wire.max_completion(3, SAMPLING)
    assert rows_of(wire.parse_completion(content).sets) == [[3, 1], [4]]
    assert wire.parse_completion(wire.dump_completion(completion([3, 4], None))).sets is None
    for damaged in (content[:-4], content + b"1234", content.replace(b'"num_entries":3', b'"num_entries":4')):
        with pytest.raises(ValueError, match="bytes of arrays|add up to"):
            wire.parse_completion(damaged)


def test_parts_of_a_completion_have_theirs_end_to_end():
    whole = joined(completion([3, 4], [[3, 1], [4]]), completion([5], [[5, 6]]))
    assert rows_of(whole.sets) == [[3, 1], [4], [5, 6]]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, "entries of 0 tokens: must be of 2"),
        ([[3, 1], [4]], "must ascend, each once"),
        ([[3, 3], [4]], "must ascend, each once"),
        ([[3]], "entries of 1 tokens: must be of 2"),
        ([[1, 3], [5]], "token 1: must be one of the entries it was chosen from"),
        ([[1, 3], []], "token 1: must be one of the entries"),
        ([[1, 3], [4, 10]], "must be in the model's vocabulary"),
    ],
)
def test_an_answer_whose_sets_cannot_be_is_refused(rows, said):
    with pytest.raises(EngineUnsound, match=said):
        check_completion(completion([3, 4], rows), SAMPLING, request_id="r", vocab_size=10, server="s")
    check_completion(completion([3, 4], [[3], [4]]), SAMPLING, request_id="r", vocab_size=10, server="s")


def test_entries_that_nobody_asked_for_and_more_than_top_k_are_refused():
    rows = completion([3, 4], [[1, 3], [4]])
    with pytest.raises(EngineUnsound, match="nobody asked"):
        check_completion(rows, replace(SAMPLING, filtered=False), request_id="r", vocab_size=10, server="s")
    with pytest.raises(EngineUnsound, match="at most top_k = 1"):
        check_completion(rows, replace(SAMPLING, top_k=1), request_id="r", vocab_size=10, server="s")


def test_an_engine_that_does_not_say_refuses_the_request():
    limits = Limits(max_context=8, vocab_size=10)
    assert "does not say" in limits.violation((1,), SAMPLING)
    assert replace(limits, has_sets=True).violation((1,), SAMPLING) == ""
    assert "temperature 0" in replace(limits, has_sets=True).violation((1,), replace(SAMPLING, temperature=0.0))
