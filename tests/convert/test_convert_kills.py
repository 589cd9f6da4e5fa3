"""A conversion into a checkpoint of a run, killed at any operation on files: nothing half there, and the same command ends it."""

import kills
import pytest
from family_cases import write_case

from moerl.convert.compare import compared
from moerl.convert.conversion import Conversion, convert
from moerl.convert.hf.hf_writing import WriteOptions
from moerl.convert.tensors import writing
from moerl.train.checkpoint.checkpoint_check import faults_of_part
from moerl.train.checkpoint.checkpoint_dirs import MANIFEST, newest
from moerl.types.errors import ConvertError

LAST = 24
"""Moments from the last shard on: metadata, manifest, digests, the rename, what is deleted after it. Each of them is tried."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_case("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def straight(source, tmp_path_factory):
    """The checkpoint of a conversion that nobody kills, and its moments."""
    target = tmp_path_factory.mktemp("straight") / "step-000000"
    return target, kills.count_moments(conversion(source, target))


def conversion(source, target, workers=2):
    return Conversion(source=source, target=target, to="moerl", dtype="float32", options=WriteOptions(shard_bytes=60_000, workers=workers))


SAVE_ID = (".metadata", MANIFEST, writing.DIGESTS)
"""torch gives every save a random number, which is in the first of these, and so in the digests of the others."""


def bytes_of(directory):
    return {path.name: b"" if path.name in SAVE_ID else path.read_bytes() for path in directory.iterdir()}


def test_wherever_it_is_killed_no_run_finds_half_a_checkpoint_and_the_same_command_ends_it(source, straight, tmp_path):
    target, moments = straight
    assert moments > 100
    wanted, seen = bytes_of(target), set()
    for moment in [0, 1, 2, *range(9, moments - LAST, moments // 4), *range(moments - LAST, moments)]:
        root = tmp_path / str(moment)
        assert not kills.kill_at(moment, conversion(source, root / "step-000000"))
        found = newest(root)
        seen.add(found is None)
        if found is None:
            convert(conversion(source, root / "step-000000"), dry_run=False)
            found = newest(root)
            assert bytes_of(found) == wanted, moment
        else:
            # Killed after the rename: whole, and perhaps with the plan and the journal beside it.
            assert bytes_of(found).items() >= wanted.items()
        assert faults_of_part(found, part=0, num_parts=1) == []
        assert compared(target, found, tolerance=0.0).is_equal
    assert seen == {True, False}
    assert compared(source, target, tolerance=0.0).is_equal


def test_finished_shards_are_kept_and_a_damaged_one_is_written_again(source, straight, tmp_path):
    target, moments = straight
    assert not kills.kill_at(moments // 2, conversion(source, tmp_path / "step-000000", workers=1))
    partial = writing.partial_of(tmp_path / "step-000000")
    kept = {path.name: path.stat().st_ino for path in sorted(partial.glob("*.distcp"))}
    damaged, *others = kept
    assert len(others) >= 2
    contents = bytearray((partial / damaged).read_bytes())
    contents[-1] ^= 1
    (partial / damaged).write_bytes(contents)
    convert(conversion(source, tmp_path / "step-000000"), dry_run=False)
    assert bytes_of(tmp_path / "step-000000") == bytes_of(target)
    inodes = {name: (tmp_path / "step-000000" / name).stat().st_ino for name in kept}
    assert all(inodes[name] == kept[name] for name in others[:-1]) and inodes[damaged] != kept[damaged]


def test_a_checkpoint_begun_in_another_dtype_is_not_continued(source, straight, tmp_path):
    assert not kills.kill_at(straight[1] // 2, conversion(source, tmp_path / "step-000000"))
    other = Conversion(source=source, target=tmp_path / "step-000000", to="moerl", dtype="bfloat16")
    with pytest.raises(ConvertError, match="was begun with another plan"):
        convert(other, dry_run=False)
    assert newest(tmp_path) is None
