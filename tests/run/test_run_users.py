"""A run of a user who is not root, has no home and a strict umask, from an installation that cannot be written."""

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from whole_runs import DIGIT, SYNC, command, rows

ROOT = Path(__file__).parents[2]
PROGRAM = f"""
for folder in {shlex.quote(str(ROOT))} {shlex.quote(sys.prefix)}; do
    mount --bind "$folder" "$folder" && mount -o remount,ro,bind "$folder" || exit 99
done
umask 077
user="env -i PATH=/usr/bin:/bin HOME=/nonexistent CUDA_HOME=/usr OMP_NUM_THREADS=1"
cd / && exec unshare --user --map-user=1000 --map-group=1000 $user "$@"
"""
"""Mounts are gone with their namespace. In the second one the user has id 1000 and no capability. A login node has CUDA's toolkit and
no GPU."""


def as_user(*words):
    return subprocess.run(["unshare", "--mount", "sh", "-c", PROGRAM, "sh", *words], capture_output=True, text=True, timeout=180)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for what is mounted")
def test_a_user_without_a_home_trains_from_an_installation_that_cannot_be_written(tmp_path):
    before = as_user("sh", "-c", f"id -u; touch {shlex.quote(str(ROOT / 'mark'))} {shlex.quote(sys.prefix + '/mark')}")
    if before.returncode == 99 or "unshare" in before.stderr:
        pytest.skip(f"namespaces cannot be made here: {before.stderr}")
    assert before.stdout == "1000\n" and before.stderr.count("Read-only file system") == 2
    done = as_user(*command(tmp_path, "num_steps=2", "save_every=1", DIGIT))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    open_to_others = [path for path in (tmp_path / SYNC).rglob("*") if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert open_to_others == []
