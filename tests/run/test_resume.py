"""A run that is killed and started again ends bit by bit like one that was never stopped, and leaves nothing behind."""

import os
import signal

import pytest
from whole_runs import SYNC, assert_all_end, rows, run, shared_memory, start, wait_for_step

from moerl.train.checkpoint import newest

KL = "algorithm.kl_coefficient=0.05"


def checkpoint_files(output_dir):
    directory = newest(output_dir / SYNC / "checkpoints")
    return directory.name, {path.name: path.read_bytes() for path in directory.glob("__*.distcp")}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("uninterrupted")
    before = shared_memory()
    outcome = run(output_dir, KL)
    assert outcome.returncode == 0, outcome.stderr
    return output_dir, outcome, shared_memory() - before


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """kill -9 of the driver after step 5, that is between checkpoint 4 and the end; then the same command again."""
    output_dir, before = tmp_path_factory.mktemp("killed"), shared_memory()
    process = start(output_dir, KL)
    family = wait_for_step(process, 5)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert_all_end(family)
    left = shared_memory() - before
    rows_at_kill = rows(output_dir)
    outcome = run(output_dir, KL)
    assert outcome.returncode == 0, outcome.stderr
    return output_dir, rows_at_kill, left


def test_a_run_ends_with_the_path_of_its_report(uninterrupted):
    output_dir, outcome, _ = uninterrupted
    assert outcome.stdout.splitlines()[-1] == f"report: {output_dir / SYNC / 'report.html'}"
    assert "<html" in (output_dir / SYNC / "report.html").read_text()


def test_trainer_and_server_agree_and_the_first_step_has_no_kl(uninterrupted):
    first = rows(uninterrupted[0])[0]
    assert first["mismatch/mean"] < 1e-4
    assert first["train/kl_old"] == 0.0
    assert first["train/kl_reference"] == 0.0
    assert rows(uninterrupted[0])[-1]["train/kl_reference"] > 0.0


def test_the_same_command_gives_the_same_bits(uninterrupted, killed):
    rows_at_kill = killed[1]
    assert len(rows_at_kill) >= 5
    assert rows_at_kill == rows(uninterrupted[0])[: len(rows_at_kill)]


def test_a_killed_run_continues_with_the_same_bits(uninterrupted, killed):
    assert [row["step"] for row in rows(killed[0])] == [1, 2, 3, 4, 5, 6]
    assert rows(killed[0]) == rows(uninterrupted[0])


def test_a_killed_run_ends_with_the_same_checkpoint(uninterrupted, killed):
    assert checkpoint_files(killed[0]) == checkpoint_files(uninterrupted[0])


def test_nothing_is_left_in_shared_memory(uninterrupted, killed):
    assert uninterrupted[2] == set()
    assert killed[2] == set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_ends_its_processes(number, tmp_path):
    before = shared_memory()
    process = start(tmp_path)
    family = wait_for_step(process, 1)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert_all_end(family)
    assert shared_memory() == before


def test_a_setting_that_must_not_change_is_refused_on_resume(uninterrupted):
    outcome = run(uninterrupted[0], KL, "seed=1", "group_size=8")
    assert outcome.returncode == 2
    assert "seed = 1: was 0" in outcome.stderr
    assert "group_size = 8: was 4" in outcome.stderr


def test_a_damaged_checkpoint_names_the_file_and_its_tensors(killed):
    directory = newest(killed[0] / SYNC / "checkpoints")
    shard = next(path for path in sorted(directory.glob("__*.distcp")) if path.stat().st_size > 1000)
    contents = bytearray(shard.read_bytes())
    contents[len(contents) // 2] ^= 1
    shard.write_bytes(contents)
    outcome = run(killed[0], KL, "num_steps=8")
    assert outcome.returncode == 1
    assert f"{shard.name}: contents differ from what was written; holds " in outcome.stderr
    assert "delete" in outcome.stderr
