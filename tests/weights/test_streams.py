"""Buckets of several ranks on their way at once."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.push_types import Bucket, BucketEntry
from moerl.types import TrainError, WeightError
from moerl.weights.send import NUM_BUFFERS
from moerl.weights.streams import _AHEAD, Streams


def job(rank, names):
    entries = [(BucketEntry(name=name, start=(0,), shape=(1,), offset=0, num_bytes=1),) for name in names]
    return tuple(Bucket(sender=rank, index=i, num_bytes=1, entries=entry, readers=(0,)) for i, entry in enumerate(entries))


class Ranks:
    """Takes `turns` of the event loop for each step, and notes what happens."""

    def __init__(self, jobs, turns):
        self.jobs, self.turns, self.packed, self.installed = jobs, turns, [], []
        self.in_flight = dict.fromkeys(jobs, 0)
        self.most = 0

    async def pack(self, rank, index):
        self.in_flight[rank] += 1
        assert self.in_flight[rank] <= NUM_BUFFERS
        ahead = [bucket for bucket in self.packed if bucket not in self.installed]
        self.most = max(self.most, len(ahead))
        await self._pass_time(rank)
        self.packed.append((rank, index))
        return self.jobs[rank][index]

    async def install(self, bucket):
        await self._pass_time(bucket.sender)
        self.installed.append((bucket.sender, bucket.index))
        self.in_flight[bucket.sender] -= 1

    async def _pass_time(self, rank):
        for _ in range(self.turns[rank]):
            await asyncio.sleep(0)

    def run(self):
        async def whole():
            return await Streams(self.jobs, self.pack, self.install, settle_seconds=0.1).run()

        return asyncio.run(whole())


@given(st.lists(st.tuples(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12), st.integers(0, 9)), min_size=1, max_size=4))
def test_every_bucket_is_packed_once_in_its_rank_s_order_and_installed_before_its_buffer_is_used_again(cases):
    jobs = {rank: job(rank, names) for rank, (names, _) in enumerate(cases)}
    ranks = Ranks(jobs, {rank: turns for rank, (_, turns) in enumerate(cases)})
    assert sorted((bucket.sender, bucket.index) for bucket in ranks.run()) == sorted(ranks.packed) == sorted(ranks.installed)
    for rank, mine in jobs.items():
        assert [index for sender, index in ranks.packed if sender == rank] == list(range(len(mine)))


def test_a_fast_rank_waits_for_a_slow_one_near_the_same_tensors():
    names = [f"{number:03d}" for number in range(60)]
    ranks = Ranks({0: job(0, names), 1: job(1, names)}, {0: 0, 1: 40})
    ranks.run()
    first = {rank: [place for place, (sender, _) in enumerate(ranks.packed) if sender == rank] for rank in (0, 1)}
    for index in range(60):
        behind = sum(place < first[0][index] for place in first[1])
        assert index - behind <= _AHEAD * 2


def test_what_is_no_error_of_the_push_is_told_before_what_it_caused():
    async def pack(rank, index):
        if rank == 1:
            raise TrainError("rank 1 died")
        return job(0, "abc")[index]

    async def install(bucket):
        raise WeightError("weight push failed\n* server: no more memory to map")

    async def whole():
        return await Streams({0: job(0, "abc"), 1: job(1, "abc")}, pack, install, settle_seconds=0.1).run()

    with pytest.raises(TrainError, match="rank 1 died"):
        asyncio.run(whole())


def test_every_side_that_failed_in_the_time_that_is_left_is_told_once():
    async def pack(rank, index):
        return job(rank, "abc")[index]

    async def install(bucket):
        if bucket.sender == 1:
            await asyncio.sleep(0.01)
        raise WeightError(f"weight push failed at bucket of {bucket.sender}\n* server: gone\n* other {bucket.sender}: gone too")

    async def whole():
        return await Streams({0: job(0, "a"), 1: job(1, "a")}, pack, install, settle_seconds=5).run()

    with pytest.raises(WeightError) as caught:
        asyncio.run(whole())
    assert str(caught.value) == "weight push failed at bucket of 0\n* server: gone\n* other 0: gone too\n* other 1: gone too"
