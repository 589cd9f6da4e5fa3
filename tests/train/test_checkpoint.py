"""Checkpoints on disk: complete or not there, never loaded damaged, never more than asked for."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from moerl.train.checkpoint import checkpoint_check as check
from moerl.train.checkpoint import checkpoint_dirs
from moerl.types.errors import CheckpointError

TENSORS = {f"decoder.layers.{i}.weight": torch.arange(64, dtype=torch.float32) + i for i in range(5)}
SHARD = "__0_0.distcp"
MODEL = {"num_hidden_layers": 5, "rope_theta": 1e4}


def save(root, version, *, keep=100, **state):
    """A checkpoint with one real shard file."""
    temporary = checkpoint_dirs.begin(root, version)
    dcp.save(dict(TENSORS), checkpoint_id=temporary, no_dist=True)
    files = checkpoint_dirs.digest_files(temporary, sorted(path.name for path in temporary.iterdir()))
    return checkpoint_dirs.commit(temporary, files, {"version": version, **state}, MODEL, keep=keep)


def verify(directory, num_parts=1):
    """As the driver and `num_parts` ranks do together."""
    check.read_state(directory)
    faults = [fault for part in range(num_parts) for fault in check.faults_of_part(directory, part=part, num_parts=num_parts)]
    if faults:
        raise check.damaged(directory, faults)


def names(root):
    return sorted(path.name for path in root.iterdir())


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    save(root, 1)
    save(root, 2)
    return root


@pytest.fixture
def saved(saved_once, tmp_path):
    """The newer of two checkpoints, to be damaged."""
    shutil.copytree(saved_once, tmp_path / "checkpoints")
    return checkpoint_dirs.newest(tmp_path / "checkpoints")


# -- complete or not there -------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_with_its_state_and_its_tensors(saved_once):
    directory = checkpoint_dirs.newest(saved_once)
    verify(directory)
    assert check.read_state(directory) == {"version": 2}
    assert check.read_manifest(directory).model == MODEL
    loaded = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(loaded, checkpoint_id=directory, no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("num_parts", [2, 3, 7])
def test_the_ranks_together_check_every_file(saved, num_parts):
    verify(saved, num_parts)
    (saved / SHARD).write_bytes(b"")
    with pytest.raises(CheckpointError, match=SHARD):
        verify(saved, num_parts)


def test_without_a_checkpoint_there_is_no_newest(tmp_path):
    assert checkpoint_dirs.newest(tmp_path) is None
    assert checkpoint_dirs.newest(tmp_path / "not-there") is None


def test_interrupted_saves_and_deletions_are_not_the_newest_and_are_removed_by_the_next_save(tmp_path):
    save(tmp_path, 2)
    for name in ("step-000003.tmp", "step-000004.tmp", "step-000001.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / SHARD).write_bytes(b"half")
    assert checkpoint_dirs.newest(tmp_path).name == "step-000002"
    again = save(tmp_path, 3)
    assert checkpoint_dirs.newest(tmp_path) == again
    verify(again)
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_newest_goes_by_number_and_ignores_other_names(tmp_path):
    for name in ("step-000009", "step-999999", "step-1000000", "step-7", "step-notes", "step-2000000.tmp", "step-3000000.old"):
        (tmp_path / name).mkdir()
    assert checkpoint_dirs.newest(tmp_path).name == "step-1000000"


def test_only_the_newest_are_kept(tmp_path):
    for version in (1, 2, 3, 999_999, 1_000_000):
        save(tmp_path, version, keep=2)
    assert names(tmp_path) == ["step-1000000", "step-999999"]


def test_of_a_checkpoint_that_was_moved_and_linked_the_link_alone_is_deleted(tmp_path):
    root, archive = tmp_path / "checkpoints", tmp_path / "archive"
    save(root, 1).rename(archive)
    for name in ("step-000001", "step-000000.old"):
        (root / name).symlink_to(archive)
    verify(root / "step-000001")
    save(root, 2, keep=1)
    assert names(root) == ["step-000002"]
    verify(archive)


# -- never loaded damaged --------------------------------------------------------------------------------------

HOLDS = "holds decoder.layers.0.weight, decoder.layers.1.weight, decoder.layers.2.weight and 2 more tensors"


def flip(path, position, bit=0):
    contents = bytearray(path.read_bytes())
    contents[position % len(contents)] ^= 1 << bit
    path.write_bytes(contents)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: flip(path, 1000), "contents differ from what was written"),
        (cut, r"\d+ bytes, should be \d+"),
        (lambda path: path.unlink(), "missing"),
    ],
    ids=["flipped", "truncated", "missing"],
)
def test_a_damaged_shard_is_named_with_its_tensors_and_the_checkpoint_to_go_back_to(saved, damage, what):
    damage(saved / SHARD)
    with pytest.raises(
        CheckpointError, match=rf"is damaged; delete .*step-000002 to continue from step-000001, .*\n\* {SHARD}: {what}; {HOLDS}$"
    ):
        verify(saved)


@given(st.data())
def test_every_flipped_bit_is_found(saved_once, data):
    directory = checkpoint_dirs.newest(saved_once)
    name = data.draw(st.sampled_from(sorted(check.read_manifest(directory).files)))
    position, bit = data.draw(st.integers(0, (directory / name).stat().st_size - 1)), data.draw(st.integers(0, 7))
    flip(directory / name, position, bit)
    try:
        with pytest.raises(CheckpointError, match=f"(?m)^\\* {name}: contents differ"):
            verify(directory)
    finally:
        flip(directory / name, position, bit)
    verify(directory)


def test_every_damaged_file_is_named(saved):
    cut(saved / SHARD)
    cut(saved / ".metadata")
    with pytest.raises(CheckpointError) as error:
        verify(saved)
    lines = str(error.value).splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == ["* .metadata", f"* {SHARD}"]
    assert "holds" not in str(error.value)  # what the shard holds stands in the other file


def test_a_damaged_state_is_found_before_it_is_read(saved):
    (saved / "state.json").write_text('{"version": 7}')
    with pytest.raises(CheckpointError, match=r"(?s)continue from step-000001.*\n\* state\.json: contents differ"):
        check.read_state(saved)


@pytest.mark.parametrize("text", [None, "", "{", "[1, 2]", '{"common.pt": 3}'])
def test_a_damaged_manifest_is_named_with_the_checkpoint_to_go_back_to(saved, text):
    manifest = saved / checkpoint_dirs.MANIFEST
    manifest.unlink() if text is None else manifest.write_text(text)
    with pytest.raises(CheckpointError, match=r"delete .*step-000002 to continue from step-000001.*\n\* manifest\.json: cannot be read"):
        check.check(saved)


def test_a_changed_manifest_is_not_taken_for_damage_to_what_it_lists(saved):
    manifest = saved / checkpoint_dirs.MANIFEST
    manifest.write_text(manifest.read_text().replace('"num_hidden_layers": 5', '"num_hidden_layers": 7'))
    with pytest.raises(CheckpointError, match=r"\* manifest\.json: contents differ from what was written$"):
        check.read_manifest(saved)


def test_the_checkpoint_to_go_back_to_is_a_whole_one(saved):
    """The newest of those, and every one between is named with its faults."""
    root = saved.parent
    for version in (3, 4):
        save(root, version)
    for version in (2, 3, 4):
        (root / f"step-{version:06d}" / SHARD).unlink()
    with pytest.raises(CheckpointError) as error:
        check.check(checkpoint_dirs.newest(root))
    first, *others = str(error.value).splitlines()
    doomed = f"{root}/step-000004 and {root}/step-000003 and {root}/step-000002"
    assert first == (
        f"checkpoint {root}/step-000004 is damaged; delete {doomed} to continue from step-000001, which has every file in its full size"
    )
    assert [line.split(":")[0] for line in others if line.startswith("*")] == [f"* {SHARD}"] * 3


def test_without_an_older_checkpoint_the_remedy_is_to_start_again(saved):
    shutil.rmtree(saved.parent / "step-000001")
    cut(saved / SHARD)
    with pytest.raises(CheckpointError, match=r"delete .*step-000002 to start the run again"):
        verify(saved)


def test_after_the_remedy_the_older_checkpoint_is_the_newest(saved):
    cut(saved / SHARD)
    shutil.rmtree(saved)
    verify(checkpoint_dirs.newest(saved.parent))
    assert check.read_state(checkpoint_dirs.newest(saved.parent)) == {"version": 1}
