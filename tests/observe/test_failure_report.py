"""Which process a failure report names, in which order it says things, and what of a traceback it shows."""

import socket
from pathlib import Path

import pytest

import moerl
from moerl.cluster.error_texts import headline
from moerl.observe.failure import write_failure
from moerl.types.errors import CheckpointError, EngineError, HangError, MoerlError, Origin, TrainError

RANK = Origin(who="rank 3 of 8", node="n17", doing="write_checkpoint", log="/run/logs/rank-3.log", details="rank 3:\nall of its traceback")


def raised(error, cause=None):
    with pytest.raises(type(error)) as caught:
        raise error from cause
    return caught.value


def written(run_dir, error, **options):
    """The closing lines, and the file."""
    closing = write_failure(run_dir, error, **{"phase": "rollout", "version": 6, **options})
    return closing.splitlines(), (run_dir / "failure.txt").read_text()


def test_the_process_in_which_it_began_is_named_however_often_the_error_was_wrapped(tmp_path):
    echo = raised(RuntimeError("Connection closed by peer"))
    cause = raised(TrainError("rank 3 of 8 failed").began_in(RANK), echo)
    error = raised(MoerlError("the run stopped"), raised(CheckpointError("could not be written"), cause))
    closing, text = written(tmp_path, error)
    assert closing == [
        "failed: rank 3 of 8 on node n17, in write_checkpoint, at step 7",
        "log: /run/logs/rank-3.log",
        f"more: {tmp_path}/failure.txt",
    ]
    places = [text.index(part) for part in ("the run stopped", closing[0], closing[1], "all of its traceback", "Connection closed by peer")]
    assert places == sorted(places)
    assert places[0] == 0


def test_a_server_that_ended_is_named_with_the_phase_the_driver_was_in(tmp_path):
    ended = raised(EngineError("ended").began_in(Origin(who="rollout server a:1", node="n2", doing="", log="/run/logs/rollout-0.log")))
    closing, _ = written(tmp_path, raised(EngineError("no rollout server is left"), ended), phase="push")
    assert closing[0] == "failed: rollout server a:1 on node n2, in push, at step 7"


def test_a_bug_of_the_driver_is_shown_by_its_innermost_frames(tmp_path):
    def inner():
        return {}["nothing"]

    def outer():
        inner()

    with pytest.raises(KeyError) as caught:
        outer()
    closing, text = written(tmp_path, caught.value, phase="update", version=None)
    assert closing[0] == "    KeyError: 'nothing'"
    assert closing[1].startswith(f"      at {__file__}:")
    assert closing[1].endswith('in inner: return {}["nothing"]')
    assert closing[2].endswith("in outer: inner()")
    assert closing[-3:-1] == [f"failed: driver on node {socket.gethostname()}, in update, at step 1", f"log: {tmp_path}/run.log"]
    assert "Traceback (most recent call last):" in text


def test_the_step_after_a_resume_is_that_of_the_newest_checkpoint(tmp_path):
    (tmp_path / "checkpoints" / "step-000040").mkdir(parents=True)
    closing, _ = written(tmp_path, raised(HangError("update: rank 0 did not arrive")), version=None)
    assert closing[0].endswith("at step 41")


def test_an_evaluation_that_failed_was_at_no_step(tmp_path):
    closing, _ = written(tmp_path, raised(HangError("rollout: server a:1 did not arrive")), phase="eval", version=None, trains=False)
    assert closing[0] == f"failed: driver on node {socket.gethostname()}, in eval"


PACKAGE = Path(moerl.__file__).parent
REMOTE = f"""\x1b[36mray::TrainWorker.update()\x1b[39m (pid=3, ip=1.2.3.4, actor_id=5, repr=<moerl.train.train_worker.TrainWorker object>)
  File "/env/lib/python3.11/site-packages/ray/x.py", line 7, in span
    return method(*args)
           ^^^^^^^^^^^^^
  File "{PACKAGE}/train/megatron_engine.py", line 88, in update
    return self._update(batch)
           ^^^^^^^^^^^^^^^^^^^
  File "/home/me/own/loss.py", line 4, in token_loss
    return ratio / zero
           ~~~~~~^~~~~~
  File "{PACKAGE}/train/rank_progress.py", line 5, in wrapped
    return call(*args)
  File "/env/lib/python3.11/site-packages/torch/_ops.py", line 9, in __call__
    return self._op(*args)
RuntimeError: division by zero
of two lines"""


def test_frames_of_libraries_are_left_out_and_the_innermost_comes_first():
    assert headline(REMOTE) == [
        "    RuntimeError: division by zero",
        "    of two lines",
        "      at /home/me/own/loss.py:4 in token_loss: return ratio / zero",
        "      at moerl/train/megatron_engine.py:88 in update: return self._update(batch)",
    ]


def test_a_frame_outside_the_package_keeps_its_path_also_below_a_folder_of_the_package_s_name():
    text = 'Traceback (most recent call last):\n  File "/home/me/moerl/tests/run/x.py", line 1, in f\n    g()\nKeyError: 1'
    assert headline(text) == ["    KeyError: 1", "      at /home/me/moerl/tests/run/x.py:1 in f: g()"]


def test_of_chained_tracebacks_the_last_counts():
    first = 'Traceback (most recent call last):\n  File "/a.py", line 1, in f\n    g()\nKeyError: 1\n\nDuring handling:\n\n'
    assert headline(first + REMOTE)[0] == "    RuntimeError: division by zero"
    assert headline("no traceback at all") == ["    no traceback at all"]
