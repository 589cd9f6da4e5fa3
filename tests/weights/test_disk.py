"""Pushes through files: whole and delta, and files that are damaged."""

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from session_process import SPECS, Engine, EngineProcess, Source

from moerl.types.errors import WeightError
from moerl.types.push import Bucket as BucketOf
from moerl.types.push import BucketEntry
from moerl.weights.plan.spec_tensors import spec_of
from moerl.weights.sync import WeightSync
from moerl.weights.transport.disk_transport import BLOCK_BYTES, DiskReader, DiskSender
from moerl.weights.verify.digest import tensor_digest

LARGE = {f"layers.{i}.weight": torch.randn(300, 1000, generator=torch.Generator().manual_seed(i)) for i in range(4)}
LARGE_SPECS = {name: spec_of(name, tensor) for name, tensor in LARGE.items()}
WHOLE = sum(tensor.nbytes for tensor in LARGE.values())


@pytest.fixture
def make_source(tmp_path):
    sources = []

    def make(model=LARGE, *, delta=True, bucket_bytes=2**21):
        sources.append(Source(model, bucket_bytes=bucket_bytes, directory=tmp_path / "push", delta=delta))
        return sources[-1]

    yield make
    for source in sources:
        source.close()


def entry_of(name, size):
    return BucketEntry(name=name, start=(0,), shape=(size,), offset=0, num_bytes=size)


def changed(source, name="layers.2.weight", row=7):
    source.model = {other: tensor.clone() for other, tensor in source.model.items()}
    source.model[name][row] += 1.0


def digests(model):
    return {name: tensor_digest(tensor) for name, tensor in model.items()}


def test_a_delta_brings_only_the_blocks_that_changed_to_every_process(make_source):
    source, engines = make_source(), {name: EngineProcess(specs=LARGE_SPECS) for name in "ab"}
    sync = WeightSync(source, engines, transport="disk")

    async def push_three_times():
        first = await sync.push(1)
        changed(source)
        second = await sync.push(2)
        return first, second, await sync.push(3)

    try:
        first, second, third = asyncio.run(push_three_times())
        assert [engine.call("digests") for engine in engines.values()] == [digests(source.model)] * 2
    finally:
        for engine in engines.values():
            engine.close()
    assert first.num_written > WHOLE
    assert 0 < second.num_written < 2 * BLOCK_BYTES + 1000 * second.num_buckets
    assert third.num_written < 1000 * third.num_buckets
    assert source.num_listens == 1


def test_without_delta_every_push_is_whole(make_source):
    source = make_source(delta=False)
    sync = WeightSync(source, {"a": Engine(specs=LARGE_SPECS)}, transport="disk")
    written = [asyncio.run(sync.push(version)).num_written for version in (1, 2)]
    assert min(written) > WHOLE


def test_two_buckets_are_on_disk_at_any_time_and_none_after_a_push(make_source, tmp_path):
    source, seen = make_source(), []

    class Watching(Engine):
        def load(self, name, start, piece):
            seen.append(len(list((tmp_path / "push").glob("push-*"))))
            return super().load(name, start, piece)

    asyncio.run(WeightSync(source, {"a": Watching(specs=LARGE_SPECS)}, transport="disk").push(1))
    assert len(seen) > 3
    assert max(seen) <= 2
    assert list((tmp_path / "push").glob("push-*")) == []
    source.close()
    assert list((tmp_path / "push").iterdir()) == []


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def without_its_index(path):
    contents = bytearray(path.read_bytes())
    contents[-40] ^= 1
    path.write_bytes(contents)


def with_a_flipped_bit(path):
    contents = bytearray(path.read_bytes())
    contents[0] ^= 1
    path.write_bytes(contents)


def removed(path):
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncated, "truncated"),
        (without_its_index, "its index has another digest"),
        (with_a_flipped_bit, "block [0-9]+ has another digest"),
        (removed, "No such file"),
    ],
)
@pytest.mark.parametrize("push", [1, 2])
def test_a_file_that_is_damaged_is_named_and_the_next_push_is_whole(push, damage, said, make_source, tmp_path, monkeypatch):
    source, damages = make_source(), []
    fetch = DiskReader.fetch

    def damaging_fetch(reader, bucket, source):
        if damages and bucket.index == 2:
            damages.pop()(tmp_path / "push" / f"push-{push:06d}-bucket-00002")
        return fetch(reader, bucket, source)

    monkeypatch.setattr(DiskReader, "fetch", damaging_fetch)
    engine = Engine(specs=LARGE_SPECS)
    sync = WeightSync(source, {"b": engine}, transport="disk")
    for version in range(1, push):
        asyncio.run(sync.push(version))
    changed(source)
    damages.append(damage)
    with pytest.raises(WeightError, match=rf"(?s)at the transfer.*\* b: .*push-{push:06d}-bucket-00002.*{said}.*next push will be whole"):
        asyncio.run(sync.push(push))
    assert asyncio.run(sync.push(push + 1)).num_written > WHOLE
    assert engine.digests() == digests(source.model)


def test_a_server_that_does_not_see_the_directory_refuses_before_any_byte_moves(tmp_path):
    with pytest.raises(WeightError, match=r"does not see .*elsewhere.*weights\.transport=nccl"):
        DiskReader(str(tmp_path / "elsewhere"), read=None)


def test_one_server_that_does_not_see_it_stops_the_push_before_any_server_gets_a_bucket(make_source, tmp_path):
    installed = []

    class Counting(Engine):
        async def install(self):
            installed.append(self)

    class Elsewhere(Counting):
        async def connect(self, offer):
            (tmp_path / "push" / "sender").unlink()
            await super().connect(offer)

    engines = {"far": Elsewhere(specs=LARGE_SPECS), "good": Counting(specs=LARGE_SPECS)}
    with pytest.raises(WeightError, match=r"(?s)at connecting by disk.*\* far: WeightError: .*does not see"):
        asyncio.run(WeightSync(make_source(), engines, transport="disk", deadline_seconds=60, settle_seconds=1).push(1))
    assert installed == []


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightError, match=r"file/push cannot be written"):
        DiskSender(tmp_path / "file" / "push", delta=True).listen()


def test_an_engine_that_cannot_give_back_its_weights_refuses_a_delta(make_source):
    source, engine = make_source(), Engine(specs=LARGE_SPECS)
    engine.session._read = None
    sync = WeightSync(source, {"a": engine}, transport="disk")
    asyncio.run(sync.push(1))
    with pytest.raises(WeightError, match=r"weights\.disk_delta=false"):
        asyncio.run(sync.push(2))


def test_a_reader_that_missed_a_push_refuses_its_delta(tmp_path):
    sender, data = DiskSender(tmp_path / "push", delta=True), torch.arange(100, dtype=torch.uint8)
    sender.listen()
    reader = DiskReader(str(sender.directory), read=lambda name: data)
    for _ in range(2):
        sender.write(0, data)
        sender.end()
    path, _ = sender.write(0, data)
    bucket = BucketOf(sender=0, readers=(0,), index=0, num_bytes=100, entries=(entry_of("a", 100),))
    with pytest.raises(WeightError, match="changed since push 2, and the last one read here is 0"):
        reader.fetch(bucket, str(path))


@given(
    size=st.integers(1, 5 * BLOCK_BYTES),
    changes=st.lists(st.lists(st.integers(0, 5 * BLOCK_BYTES), max_size=4), min_size=1, max_size=4),
)
def test_any_sequence_of_changes_arrives(tmp_path_factory, size, changes):
    sender = DiskSender(tmp_path_factory.mktemp("delta") / "push", delta=True)
    held = torch.zeros(size, dtype=torch.uint8)
    sender.listen()
    reader, data = DiskReader(str(sender.directory), read=lambda name: held), torch.randint(0, 256, (size,)).to(torch.uint8)
    bucket = BucketOf(sender=0, readers=(0,), index=0, num_bytes=size, entries=(entry_of("a", size),))
    for positions in changes:
        for position in positions:
            data[position % size] += 1
        path, num_written = sender.write(0, data)
        assert path.stat().st_size == num_written
        held.copy_(reader.fetch(bucket, str(path)))
        sender.end()
        assert torch.equal(held, data)
    sender.close()


def test_tensors_of_every_kind_arrive(make_source):
    from session_process import MODEL

    source, engine = make_source(MODEL, bucket_bytes=8192), Engine(specs=SPECS)
    sync = WeightSync(source, {"a": engine}, transport="disk")
    asyncio.run(sync.push(1))
    source.model["steps"] = source.model["steps"] + 1
    asyncio.run(sync.push(2))
    assert engine.digests() == digests(source.model)
