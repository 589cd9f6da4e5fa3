"""kill -9 before every operation on the file system that a save makes: what is there then is whole, and the next save cleans up.

A process of its own begins a checkpoint, writes a shard in two halves, commits, and deletes expired ones; an audit hook counts what
it does to files and kills it at the n-th. The loop ends with the first process that lived.
"""

import signal
import subprocess
import sys

import pytest

from moerl.train.checkpoint import checkpoint_check as check
from moerl.train.checkpoint import checkpoint_dirs

SAVE = """
import os, signal, sys
from pathlib import Path
from moerl.train.checkpoint import checkpoint_dirs

root, version, keep, survives = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
count = 0

def kill_at(event, args):
    global count
    on_files = event.split(".")[0] in ("open", "os", "shutil") and any(str(root) in str(arg) for arg in args)
    if on_files or event == "halfway":
        count += 1
        if count > survives:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill_at)
temporary = checkpoint_dirs.begin(root, version)
with (temporary / "shard").open("wb") as file:
    file.write(b"first half ")
    file.flush()
    sys.audit("halfway")
    file.write(b"%d" % version)
checkpoint_dirs.commit(temporary, checkpoint_dirs.digest_files(temporary, ["shard"]), {"version": version}, {}, keep=keep)
print(count)
"""


def save(root, version, *, keep=2, survives=10**6):
    command = [sys.executable, "-c", SAVE, str(root), str(version), str(keep), str(survives)]
    return subprocess.run(command, capture_output=True, text=True)


def assert_every_complete_one_is_whole(root):
    for directory in checkpoint_dirs.complete(root):
        assert check.read_state(directory) == {"version": checkpoint_dirs.version_of(directory)}
        assert check.content_faults(directory, ["shard", "state.json"]) == []
        assert (directory / "shard").read_bytes() == b"first half %d" % checkpoint_dirs.version_of(directory)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_save_killed_anywhere_leaves_whole_checkpoints(keep, tmp_path):
    """Of 1 and 2, when 3 is saved; keep=1 also leaves 1 for a deletion that is killed."""
    root = tmp_path / "checkpoints"
    for version in (1, 2):
        assert save(root, version).returncode == 0
    versions_seen, killed = set(), 0
    while (process := save(root, 3, keep=keep, survives=killed)).returncode == -signal.SIGKILL:
        killed += 1
        assert_every_complete_one_is_whole(root)
        left = [checkpoint_dirs.version_of(directory) for directory in checkpoint_dirs.complete(root)]
        versions_seen.add(tuple(left))
        assert left[-1] == (3 if 3 in left else 2)
        if 3 in left:  # the next run goes on from 3, and begins with what this one left
            assert 2 in left or keep == 1
            restore(root, keep)
    assert process.returncode == 0, process.stderr
    assert killed > 12
    assert (1, 2) in versions_seen and (1, 2, 3) in versions_seen
    expected = [3] if keep == 1 else [2, 3]
    assert [checkpoint_dirs.version_of(directory) for directory in checkpoint_dirs.complete(root)] == expected


def restore(root, keep):
    """To 1 and 2 again, by way of the save a resumed run would make: it removes every trace of the killed one."""
    assert save(root, 4, keep=keep).returncode == 0
    assert all(path.suffix == "" for path in root.iterdir())
    assert_every_complete_one_is_whole(root)
    for directory in root.iterdir():
        subprocess.run(["rm", "-r", str(directory)], check=True)
    for version in (1, 2):
        assert save(root, version).returncode == 0
