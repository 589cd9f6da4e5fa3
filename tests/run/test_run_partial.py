"""A whole run whose pushes find completions unfinished, on a real server: they go on after it, and what trains is sound."""

from whole_runs import ASYNC, DIGIT, SMALL, rows

from moerl import run
from moerl.check import load_checked

OVERRIDES = (
    "sft=null", "num_steps=3", "save_every=0", "max_staleness=1", "rollout.partial=true", "rollout.max_running=3", DIGIT,
    "rollout.max_response_tokens=40", "model.max_context=64",
    "algorithm.overlong_buffer=8", "algorithm.max_attempts=50", "train.router_replay=rollout",
)  # fmt: skip
"""Few requests at a time and long answers: those of the next step are running whenever weights are pushed."""


def test_completions_that_a_push_ends_are_trained_whole(tmp_path):
    run.train(load_checked([f"recipe={ASYNC}", *SMALL, *OVERRIDES, f"output_dir={tmp_path}"]))
    found = rows(tmp_path, ASYNC)
    assert [row["step"] for row in found] == [1, 2, 3]
    assert found[-1]["fleet/resumed"] > 0
    assert max(row["staleness/max"] for row in found) == 1
    assert found[0]["mismatch/mean"] < 1e-6
    assert all(row["length/max"] <= 40 for row in found)
    assert all(row["routing/replayed"] > 0.8 for row in found)
