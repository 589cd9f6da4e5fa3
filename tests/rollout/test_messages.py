"""Messages of several requests and frames of their answers, in any sizes and pieces."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.rollout.server import messages
from moerl.rollout.server.messages import Frames, dump_frame, dump_requests, messages_of, parse_requests
from moerl.rollout.server.wire import GenerateRequest
from moerl.types.completion import SamplingParams

PROMPTS = [(1, 2, 3), (4,), (5, 6)]


def requests_of(places):
    """Of the prompts at these places."""
    return [
        GenerateRequest(request_id=f"r{number}", prompt_ids=PROMPTS[place], sampling=SamplingParams(max_tokens=3, seed=2**100 + number))
        for number, place in enumerate(places)
    ]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_requests_cross_as_they_are_and_a_prompt_once(places):
    requests = requests_of(places)
    content = dump_requests(requests)
    assert list(parse_requests(content)) == requests
    assert [content.count(b"[1,2,3]"), content.count(b"[4]"), content.count(b"[5,6]")] == [int(place in places) for place in range(3)]


@given(st.lists(st.integers(0, 2), max_size=12), st.integers(1, 4), st.integers(1, 9))
def test_messages_hold_all_in_order_and_no_more_than_a_server_takes(places, most, tokens):
    requests = requests_of(places)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "MAX_REQUESTS", most)
        patch.setattr(messages, "MAX_TOKENS", tokens)
        found = list(messages_of(requests))
    assert [request for message in found for request in message] == requests
    for message in found:
        prompts = {request.prompt_ids for request in message}
        assert len(message) <= most
        assert len(prompts) == 1 or sum(map(len, prompts)) <= tokens


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=12), st.integers(1, 9))
def test_messages_of_requests_that_go_on_are_cut_by_all_that_is_sent(places, tokens):
    """What was drawn goes with the prompt, which no other request has then."""
    requests, drawn = requests_of([place for place, _ in places]), [number for _, number in places]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "MAX_TOKENS", tokens)
        found = list(messages_of(requests, drawn))
    assert [request for message in found for request in message] == requests
    left = list(drawn)
    for message in found:
        mine, left = left[: len(message)], left[len(message) :]
        shared = {request.prompt_ids for request, number in zip(message, mine, strict=True) if not number}
        sent = [len(request.prompt_ids) + number for request, number in zip(message, mine, strict=True) if number]
        assert len(shared) + len(sent) == 1 or sum(map(len, shared)) + sum(sent) <= tokens


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_frames_come_out_whole_whatever_pieces_they_come_in(contents, random):
    order = list(range(len(contents)))
    random.shuffle(order)
    stream = b"".join(dump_frame(place, 200 + place, contents[place]) for place in order)
    frames, found, at = Frames([30] * len(contents)), [], 0
    while at < len(stream):
        size = random.randrange(1, 20)
        found += frames.feed(stream[at : at + size])
        at += size
    assert found == [(place, 200 + place, contents[place]) for place in order]
    assert not frames.missing and frames.unread == b""


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 40))
def test_what_is_sent_at_a_time_is_bounded(sizes, most):
    frames = [bytes(range(size)) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "PIECE_BYTES", most)
        pieces = messages.pieces_of(frames)
    assert b"".join(pieces) == b"".join(frames) and pieces
    assert all(len(piece) <= most for piece in pieces)


def test_a_length_that_is_announced_takes_no_memory():
    frames = Frames([2**50])
    assert list(frames.feed(struct.pack("<IHQ", 0, 200, 2**50) + b"x")) == []
    assert len(frames.unread) == 15


def test_a_second_answer_to_one_request_is_refused():
    with pytest.raises(ValueError, match="an answer to request 0, which waits for none"):
        list(Frames([9, 9]).feed(2 * dump_frame(0, 200, b"x")))
