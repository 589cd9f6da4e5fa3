"""One call of the operating system fails, anywhere in a whole run: it survives, or ends with a code that the docs name and one cause, and
the same command goes on with the same bits."""

import re
import subprocess
from dataclasses import replace
from random import Random

import pytest
from call_faults import KINDS, CallFaults, compiled
from shards import fuzzing_seed
from whole_runs import (
    DIGIT,
    SYNC,
    checkpoint_tensors,
    command,
    left_in_shared_memory,
    rows,
    run,
    shared_memory,
    users_environment,
    without_restarts,
)

from moerl.types.exit_codes import ExitCode

NUM_PARTS = 4
"""Of the calls of each kind: one of every part fails in a run of its own."""
DEADLINES = [f"deadlines.{phase}_seconds=60" for phase in ("start", "load", "rollout", "completion", "update", "push", "save")]
OVERRIDES = ("num_steps=3", "save_every=1", DIGIT, *DEADLINES)
CODES = (ExitCode.DONE, ExitCode.FAILED, ExitCode.UNUSABLE, ExitCode.KILLED)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Directory of a run in which nothing failed, and how many calls it made."""
    library = compiled(tmp_path_factory.mktemp("library"))
    if library is None:
        pytest.skip("needs a C compiler")
    directory = tmp_path_factory.mktemp("undisturbed")
    faults = CallFaults(library=library, file=directory / "calls")
    done = run(directory, *OVERRIDES, env=users_environment() | faults.arm())
    assert done.returncode == 0, done.stderr
    assert min(faults.counts().values()) > NUM_PARTS
    return directory, faults


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_which_one_call_fails_survives_or_says_why_and_goes_on(kind, part, undisturbed, tmp_path):
    directory, counted = undisturbed
    drawn = Random(f"{kind} {part} {fuzzing_seed()}").random()
    faults, at = replace(counted, file=tmp_path / "calls"), 1 + int((part + drawn) / NUM_PARTS * counted.counts()[kind])
    before = shared_memory()
    done = run(tmp_path, *OVERRIDES, env=users_environment() | faults.arm(kind, at), seconds=300)
    told = f"{kind} {at}, of process {faults.failed()}: exit code {done.returncode}: {done.stderr}"
    assert done.returncode in CODES, told
    assert not re.search(r'(?m)^ *File ".*/moerl/.*", line', done.stderr), told
    assert left_in_shared_memory(before) == set(), told
    if done.returncode != 0:
        assert done.stderr.startswith("moerl: "), told
        again = run(tmp_path, *OVERRIDES, env=users_environment())
        assert again.returncode == 0, f"{told}, and again: {again.stderr}"
    assert [without_restarts(row) for row in rows(tmp_path)] == [without_restarts(row) for row in rows(directory)], told
    assert checkpoint_tensors(tmp_path / SYNC) == checkpoint_tensors(directory / SYNC), told


FULL = """
mount -t tmpfs -o size="$1" none "$2" || exit 99
shift 2
"$@"
printf "ended with %s\\n=== and with room:\\n" $? >&2
mount -o remount,size=64m none "$MOUNTED" && "$@" && cp -r "$MOUNTED/." "$KEPT"
"""
"""A small disk at $2, which is gone with its namespace; the command; the same with more room on it."""


@pytest.mark.matrix
@pytest.mark.parametrize("size", ["300k", "1m", "3m", "5m"])
def test_a_run_whose_disk_is_full_says_so_and_goes_on_when_it_has_room(size, undisturbed, tmp_path):
    """Full as the model is written, and at a checkpoint of each step."""
    directory, _ = undisturbed
    mounted, kept = tmp_path / "mounted", tmp_path / "kept"
    mounted.mkdir()
    kept.mkdir()
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", FULL, "sh", size, mounted, *command(mounted, *OVERRIDES)]
    env = users_environment() | {"MOUNTED": str(mounted), "KEPT": str(kept)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"no disk can be mounted here: {done.stderr}")
    full, _, with_room = done.stderr.partition("=== and with room:\n")
    assert (done.returncode, with_room) == (0, "")
    assert "ended with 1\n" in full and full.startswith("moerl: ") and full.count("moerl: ") == 1
    assert "No space left on device" in full and "Traceback" not in full
    assert [without_restarts(row) for row in rows(kept)] == [without_restarts(row) for row in rows(directory)]
    assert checkpoint_tensors(kept / SYNC) == checkpoint_tensors(directory / SYNC)
