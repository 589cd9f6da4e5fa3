import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moerl.observe.records import read_metrics, read_records, to_line
from moerl.observe.writers import JsonlWriter, TensorBoardWriter, wandb_id
from moerl.types.errors import ReportError


def steps(path):
    return [row["step"] for row in read_metrics(path)]


def test_every_step_is_in_the_file_when_write_returns(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"reward/mean": 0.5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward/mean": 0.5}\n'
    writer.close(succeeded=True)


def test_resuming_removes_the_steps_that_will_be_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlWriter(path)
    for step in range(1, 8):
        first.write(step, {"reward/mean": 0.0})
    first.close(succeeded=False)
    second = JsonlWriter(path)
    second.truncate_after(4)
    second.write(5, {"reward/mean": 1.0})
    second.close(succeeded=True)
    assert steps(path) == [1, 2, 3, 4, 5]
    assert read_metrics(path)[-1]["reward/mean"] == 1.0


@pytest.mark.parametrize("keep", [1, 10, 30])
def test_a_line_torn_by_a_kill_is_removed_before_the_next_one(tmp_path, keep):
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_line({"step": 1, "reward/mean": 0.5}) + to_line({"step": 2, "reward/mean": 0.75})[:keep])
    assert steps(path) == [1], "a reader of a running process passes over it"
    writer = JsonlWriter(path)
    writer.write(2, {"reward/mean": 1.0})
    writer.close(succeeded=True)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_last_line_that_lost_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    JsonlWriter(path).close(succeeded=True)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_damage_before_the_last_line_is_reported_with_its_place(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ReportError, match=r"metrics.jsonl line 2 = '\{\"st'"):
        read_records(path)


@pytest.mark.parametrize("line", ['{"reward/mean": 0.5}', "3", "null"])
def test_a_line_that_is_of_no_step_is_named_before_a_run_goes_on(tmp_path, line):
    """It ended in KeyError or TypeError, on the way back to the newest checkpoint."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(ReportError, match=r"metrics\.jsonl record 2 = "):
        JsonlWriter(path)
    assert path.read_text() == f'{{"step": 1}}\n{line}\n', "it is still there to be mended"


def test_values_that_are_not_finite_leave_valid_json(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"train/loss": float("nan"), "mismatch/kl": float("inf"), "reward/mean": 1.0})
    writer.close(succeeded=True)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 1.0}]


@given(st.text(alphabet=st.characters(), max_size=40))
def test_any_text_survives_a_line(text):
    line = to_line({"text": text}).encode(errors="backslashreplace")
    assert line.count(b"\n") == 1
    assert json.loads(line)["text"] == text


def test_tensorboard_shows_a_resumed_step_once(tmp_path):
    first = TensorBoardWriter(tmp_path)
    for step in range(1, 6):
        first.write(step, {"reward/mean": 0.0})
    first.close(succeeded=False)
    second = TensorBoardWriter(tmp_path)
    second.truncate_after(3)
    second.write(4, {"reward/mean": 1.0})
    second.close(succeeded=True)
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("reward/mean")
    assert [(event.step, event.value) for event in events] == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0)]


def test_tensorboard_needs_no_torch():
    code = "import sys, moerl.observe.observer, moerl.observe.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_wandb_id_is_of_one_run_directory_and_one_wandb_takes(tmp_path):
    """Two people who run one recipe have two runs; a resumed run is the same, wherever its directory has been moved."""
    mine, yours = tmp_path / "mine", tmp_path / "yours"
    mine.mkdir(), yours.mkdir()
    first = wandb_id(mine, "grpo/qwen3 30b#1")
    assert re.fullmatch("grpo-qwen3-30b-1-[0-9a-f]{8}", first)
    assert wandb_id(yours, "grpo/qwen3 30b#1") != first
    assert wandb_id(mine.rename(tmp_path / "moved"), "another name") == first
    assert len(wandb_id(mine.parent, "x" * 200)) == 128


def test_a_wandb_id_that_was_cut_off_is_made_anew(tmp_path):
    (tmp_path / "wandb_id.txt").write_text("")
    assert wandb_id(tmp_path, "run") == wandb_id(tmp_path, "run") != ""
