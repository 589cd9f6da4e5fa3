"""kill -9 of the driver, of one rank and of all while a whole run writes a checkpoint, and of every other process of a run: it survives, or
ends with 76 and the same run goes on; with the same bits."""

import re
import signal
import time

import psutil
import pytest
from whole_runs import (
    DIGIT,
    PROCESSES,
    SMALL,
    SYNC,
    assert_all_end,
    checkpoint_tensors,
    find,
    left_in_shared_memory,
    rows,
    shared_memory,
    start,
    users_environment,
    wait_for_step,
    without_restarts,
    words_of,
)

from moerl import run
from moerl.check import load_checked
from moerl.train.checkpoint.checkpoint_check import faults_of_part, read_state
from moerl.train.checkpoint.checkpoint_dirs import complete
from moerl.types.exit_codes import ExitCode

pytestmark = [pytest.mark.matrix, pytest.mark.usefixtures("shared_ray")]

OVERRIDES = ("num_steps=6", "save_every=1", DIGIT)


def go(output_dir):
    run.train(load_checked([f"recipe={SYNC}", *SMALL, f"output_dir={output_dir}", *OVERRIDES]))


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("never-killed")
    go(output_dir)
    return output_dir


KILLS = {
    "driver": lambda driver, family: driver.kill(),
    "rank 0": lambda driver, family: find(family, "ray::TrainWorker").kill(),
    "all ranks": lambda driver, family: [each.kill() for each in family if "ray::TrainWorker" in words_of(each)],
}


@pytest.mark.parametrize("name", KILLS)
@pytest.mark.parametrize("version", [1, 3])
def test_a_run_killed_while_it_saves_continues_with_the_same_bits(name, version, never_killed, tmp_path):
    before = shared_memory()
    process = start(tmp_path, *OVERRIDES, env=users_environment())
    checkpoints = tmp_path / SYNC / "checkpoints"
    temporary = checkpoints / f"step-{version:06d}.tmp"
    while not temporary.exists() and process.poll() is None:
        time.sleep(0.001)
    driver = psutil.Process(process.pid)
    family = driver.children(recursive=True)
    KILLS[name](driver, family)
    process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if name == "driver" else ExitCode.KILLED)
    assert_all_end(family)
    assert left_in_shared_memory(before) == set()
    for directory in complete(checkpoints):
        assert read_state(directory)["version"] <= version
        assert faults_of_part(directory, part=0, num_parts=1) == []
    go(tmp_path)
    assert rows(tmp_path) == rows(never_killed)
    tensors, expected = checkpoint_tensors(tmp_path / SYNC), checkpoint_tensors(never_killed / SYNC)
    assert tensors == expected
    assert not list(checkpoints.glob("*.tmp"))


@pytest.mark.parametrize("name", PROCESSES)
def test_a_run_that_loses_a_process_survives_or_ends_with_76_and_goes_on(name, never_killed, tmp_path):
    process = start(tmp_path, *OVERRIDES, env=users_environment())
    family = wait_for_step(process, 2)
    unknown = [words_of(each) for each in family if not any(re.search(words, words_of(each)) for words in PROCESSES.values())]
    matching = sorted((each for each in family if re.search(PROCESSES[name], words_of(each))), key=lambda each: each.create_time())
    matching[1 if name == "fork server of ranks" else 0].kill()
    stderr = process.communicate(timeout=120)[1]
    assert unknown == []
    assert_all_end(family)
    if process.returncode != 0:
        assert process.returncode == ExitCode.KILLED, stderr
        assert len(re.findall(r"(?m)^moerl: ", stderr)) == 1
        assert re.search(r"(?m)^moerl: .*(process \d+|rank \d)", stderr)
        go(tmp_path)
    assert [without_restarts(row) for row in rows(tmp_path)] == [without_restarts(row) for row in rows(never_killed)]
    assert checkpoint_tensors(tmp_path / SYNC) == checkpoint_tensors(never_killed / SYNC)
