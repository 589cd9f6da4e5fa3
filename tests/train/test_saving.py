"""Saving beside training, seen by the driver: what is in flight, what is visible when, what a failure says. Ranks are coroutines."""

import asyncio

import pytest

from moerl.train.checkpoint import checkpoint_dirs
from moerl.train.checkpoint.checkpoint_check import faults_of_part, read_state
from moerl.train.checkpoint.saver import CheckpointSaver
from moerl.train.group import MegatronTrainGroup
from moerl.types.errors import CheckpointError, TrainError


class Part:
    """Model that writes one small file; `writing` is awaited before."""

    def __init__(self, copies):
        self.copies = copies
        self.writing = asyncio.Event()
        self.staged = 0
        self.in_flight = 0
        self.error = None

    async def stage(self, *, copies):
        self.staged += 1
        assert copies == self.copies
        assert self.in_flight == 0
        return 70

    async def write(self, directory):
        self.in_flight += 1
        await self.writing.wait()
        self.in_flight -= 1
        if self.error is not None:
            raise self.error
        (directory / "common").write_text(directory.name)
        return checkpoint_dirs.digest_files(directory, ["common"])


def play(tmp_path, scenario, *, in_background=True, beside=()):
    async def whole():
        part = Part(copies=in_background)
        saver = CheckpointSaver(tmp_path, model={"layers": 1}, keep=2, in_background=in_background, policy=part)
        saver.beside |= dict.fromkeys(beside, part)
        await scenario(saver, part)

    asyncio.run(whole())


def names(root):
    return sorted(path.name for path in root.iterdir())


async def turns(count=50):
    for _ in range(count):
        await asyncio.sleep(0)


def test_training_goes_on_while_files_are_written_and_the_checkpoint_appears_last(tmp_path):
    async def scenario(saver, part):
        await saver.save(1, {"drawn": 5})
        await turns()
        assert names(tmp_path) == ["step-000001.tmp"]
        assert await saver.saved() == []
        part.writing.set()
        (saved,) = await saver.saved(wait=True)
        assert (saved.version, saved.num_bytes) == (1, 70)
        assert 0 < saved.blocked_seconds < saved.seconds
        assert names(tmp_path) == ["step-000001"]
        directory = checkpoint_dirs.newest(tmp_path)
        assert read_state(directory) == {"version": 1, "drawn": 5}
        assert faults_of_part(directory, part=0, num_parts=1) == []
        assert await saver.saved(wait=True) == []

    play(tmp_path, scenario)


def test_one_is_in_flight_at_a_time_and_none_is_forgotten(tmp_path):
    async def scenario(saver, part):
        await saver.save(1, {})
        second = asyncio.create_task(saver.save(2, {}))
        await turns()
        assert (part.staged, part.in_flight, second.done()) == (1, 1, False)
        part.writing.set()
        await second
        assert part.staged == 2
        assert [saved.version for saved in await saver.saved(wait=True)] == [1, 2]
        assert names(tmp_path) == ["step-000001", "step-000002"]

    play(tmp_path, scenario)


def test_without_background_training_waits_for_the_whole_checkpoint(tmp_path):
    async def scenario(saver, part):
        saving = asyncio.create_task(saver.save(1, {}))
        await turns()
        assert not saving.done()
        part.writing.set()
        await saving
        assert names(tmp_path) == ["step-000001"]
        (saved,) = await saver.saved()
        assert saved.blocked_seconds == saved.seconds

    play(tmp_path, scenario, in_background=False)


@pytest.mark.parametrize("error", [TrainError("rank 1 failed in write_checkpoint:\nNo space left"), OSError("No space left")])
@pytest.mark.parametrize("hears", ["saved", "save", "wait"])
def test_a_failure_in_the_background_is_raised_once_by_whatever_comes_next(tmp_path, hears, error):
    async def scenario(saver, part):
        part.writing.set()
        await saver.save(1, {})
        await saver.saved(wait=True)
        part.error = error
        await saver.save(2, {})
        await turns()
        calls = {"saved": saver.saved, "save": lambda: saver.save(3, {}), "wait": lambda: saver.saved(wait=True)}
        with pytest.raises(CheckpointError) as caught:
            await calls[hears]()
        first, *rest = str(caught.value).splitlines()
        assert first == f"checkpoint {tmp_path}/step-000002 could not be written; the newest complete one is {tmp_path}/step-000001"
        assert "\n".join(rest) == str(error)
        assert caught.value.__cause__ is error
        assert checkpoint_dirs.newest(tmp_path).name == "step-000001"
        part.error = None
        await saver.save(3, {})
        assert [saved.version for saved in await saver.saved(wait=True)] == [3]
        assert names(tmp_path) == ["step-000001", "step-000003"]

    play(tmp_path, scenario)


def test_a_checkpoint_is_complete_though_an_older_one_could_not_be_deleted(tmp_path):
    async def scenario(saver, part):
        part.writing.set()
        for version in (1, 2, 3):
            await saver.save(version, {})
            if version == 3:
                (tmp_path / "step-000001.old").write_text("in the way")
            if version < 3:
                await saver.saved(wait=True)
        with pytest.raises(CheckpointError, match=rf"^checkpoint {tmp_path}/step-000003 is complete, but .*not be deleted\n.*step-000001"):
            await saver.saved(wait=True)
        assert checkpoint_dirs.newest(tmp_path).name == "step-000003"

    play(tmp_path, scenario)


def test_a_cancelled_wait_leaves_the_checkpoint_in_flight(tmp_path):
    async def scenario(saver, part):
        await saver.save(1, {})
        waiting = asyncio.create_task(saver.saved(wait=True))
        await turns()
        waiting.cancel()
        await asyncio.wait([waiting])
        part.writing.set()
        assert [saved.version for saved in await saver.saved(wait=True)] == [1]

    play(tmp_path, scenario)


def test_models_beside_the_policy_are_parts_of_its_checkpoint(tmp_path):
    async def scenario(saver, part):
        part.writing.set()
        await saver.save(1, {})
        (saved,) = await saver.saved(wait=True)
        directory = tmp_path / "step-000001"
        assert saved.num_bytes == 140
        assert faults_of_part(directory, part=0, num_parts=1) == []
        (directory / "critic" / "common").write_text("other")
        assert faults_of_part(directory, part=0, num_parts=1) == ["* critic/common: 5 bytes, should be 6"]

    play(tmp_path, scenario, beside=["critic"])


def test_the_first_rank_makes_the_index_from_those_of_all_in_their_order(tmp_path):
    class Ranks(MegatronTrainGroup):
        def __init__(self):
            """Two ranks that write a small file each."""

        async def _all(self, verb, directory):
            assert verb == "write_checkpoint"
            for rank in range(2):
                (directory / f"rank{rank}").write_text(f"{directory.name} {rank}")
            files = [checkpoint_dirs.digest_files(directory, [f"rank{rank}"]) for rank in range(2)]
            return [checkpoint_dirs.WrittenShards(files=files[rank], index=b"%d" % rank) for rank in range(2)]

        async def _rank0(self, verb, directory, indices):
            assert (verb, indices) == ("finish_checkpoint", [b"0", b"1"])
            (directory / "common").write_text("both")
            return checkpoint_dirs.digest_files(directory, ["common"])

    assert set(asyncio.run(Ranks().write(tmp_path))) == {"rank0", "rank1", "common"}


def test_the_policy_makes_room_before_others_come_to_be_staged(tmp_path):
    calls = []

    class Noting(Part):
        async def stage(self, *, copies):
            calls.append("stage")
            return await super().stage(copies=copies)

    async def scenario():
        part = Noting(copies=True)
        part.writing.set()
        saver = CheckpointSaver(tmp_path, model={}, keep=2, in_background=True, policy=part)

        async def make_room():
            calls.append("make room")
            return 0

        saver.beside["critic"], saver.make_room = part, make_room
        await saver.save(1, {})
        await saver.saved(wait=True)

    asyncio.run(scenario())
    assert calls == ["stage", "make room", "stage"]
