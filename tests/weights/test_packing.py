from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.weights.digest import tensor_digest
from moerl.weights.send import ALIGNMENT, WeightSender
from moerl.weights.shm import SharedReader
from moerl.weights.spec import spec_of, view_as

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64])
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def named_tensors(draw):
    forms = draw(st.lists(st.tuples(SHAPES, DTYPES), max_size=12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return [(f"t{i}", torch.randint(-100, 100, shape, generator=generator).to(dtype)) for i, (shape, dtype) in enumerate(forms)]


@pytest.fixture
def sender():
    senders = []

    def make(bucket_bytes):
        senders.append(WeightSender("shm", bucket_bytes=bucket_bytes))
        return senders[-1]

    yield make
    for each in senders:
        each.close()


def pack_all(sender, tensors):
    """Every bucket with a copy of its bytes, as a receiver reads them."""
    stream, reader, index = iter(tensors), SharedReader(), 0
    while (bucket := sender.pack(index, stream)) is not None:
        yield bucket, reader.fetch(bucket).clone()
        index += 1


@settings(deadline=None, derandomize=True)
@given(tensors=named_tensors(), bucket_bytes=st.integers(1, 2000))
def test_every_tensor_travels_once_in_order_and_intact(tensors, bucket_bytes):
    sender = WeightSender("shm", bucket_bytes=bucket_bytes)
    try:
        buckets = list(pack_all(sender, tensors))
    finally:
        sender.close()
    assert [entry.name for bucket, _ in buckets for entry in bucket.entries] == [name for name, _ in tensors]
    assert [bucket.index for bucket, _ in buckets] == list(range(len(buckets)))
    originals = dict(tensors)
    for bucket, data in buckets:
        assert bucket.num_bytes <= bucket_bytes or len(bucket.entries) == 1
        end = 0
        for entry in bucket.entries:
            assert entry.offset >= end and entry.offset % ALIGNMENT == 0
            end = entry.offset + entry.num_bytes
            found = view_as(data[entry.offset : end], spec_of(entry.name, originals[entry.name]))
            assert tensor_digest(found) == entry.digest == tensor_digest(originals[entry.name])
        assert end == bucket.num_bytes


@settings(deadline=None, derandomize=True)
@given(tensors=named_tensors(), bucket_bytes=st.integers(1, 2000))
def test_a_bucket_is_closed_only_when_the_next_tensor_does_not_fit(tensors, bucket_bytes):
    sender = WeightSender("shm", bucket_bytes=bucket_bytes)
    try:
        buckets = [bucket for bucket, _ in pack_all(sender, tensors)]
    finally:
        sender.close()
    for bucket, following in pairwise(buckets):
        start = -(-bucket.num_bytes // ALIGNMENT) * ALIGNMENT
        assert start + following.entries[0].num_bytes > bucket_bytes


def test_a_tensor_larger_than_a_bucket_travels_alone(sender):
    tensors = [("small", torch.ones(4)), ("large", torch.arange(5000.0)), ("last", torch.zeros(4))]
    buckets = [bucket for bucket, _ in pack_all(sender(256), tensors)]
    assert [[entry.name for entry in bucket.entries] for bucket in buckets] == [["small"], ["large"], ["last"]]


def test_strided_tensors_arrive_row_major(sender):
    tensor = torch.arange(24.0).reshape(4, 6).T
    [(bucket, data)] = pack_all(sender(4096), [("t", tensor)])
    assert torch.equal(view_as(data, spec_of("t", tensor)), tensor)
    assert bucket.entries[0].digest == tensor_digest(tensor)


def test_a_new_push_forgets_what_an_aborted_one_held_back(sender):
    one = sender(64)
    assert one.pack(0, iter([("a", torch.ones(16)), ("b", torch.ones(16))])).entries[0].name == "a"
    names = [entry.name for bucket, _ in pack_all(one, [("c", torch.ones(16)), ("d", torch.ones(16))]) for entry in bucket.entries]
    assert names == ["c", "d"]


def test_nothing_to_send_gives_no_bucket(sender):
    assert sender(64).pack(0, iter(())) is None
