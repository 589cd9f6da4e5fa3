"""One call of the operating system fails, anywhere in a whole run: it survives, or ends with a code that the docs name and one cause, and
the same command goes on with the same bits."""

import re
from dataclasses import replace
from random import Random

import pytest
from call_faults import KINDS, CallFaults, compiled
from shards import fuzzing_seed
from whole_runs import (
    DIGIT,
    SYNC,
    checkpoint_tensors,
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
