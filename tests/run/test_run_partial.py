"""A whole run whose pushes find completions unfinished, on a real server: they go on after it, and what trains is sound."""

import signal

import pytest
from whole_runs import ASYNC, DIGIT, SMALL, rows

from moerl import run
from moerl.check import load_checked

pytestmark = pytest.mark.usefixtures("shared_ray")

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


@pytest.mark.matrix
@pytest.mark.parametrize("when", ["generation", "push"])
def test_a_server_killed_between_the_parts_loses_no_completion(tmp_path, strike, when):
    """In the second step, of two servers; in the push the other one has parts that it returned already."""
    struck = strike(when, signal.SIGKILL)
    servers = ("rollout.num_servers=2", "rollout.max_running=2", "weights.bucket_bytes=100000", "deadlines.probe_seconds=2")
    run.train(load_checked([f"recipe={ASYNC}", *SMALL, *OVERRIDES, *servers, "num_steps=4", f"output_dir={tmp_path}"]))
    found = rows(tmp_path, ASYNC)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert (found[-1]["fleet/restarts"], struck.pools[0].fleet.members[0].num_starts) == (1.0, 2)
    assert found[-1]["fleet/resumed"] > 0
    assert all(row["reward/errors"] == 0 for row in found)
    assert max(row["staleness/max"] for row in found) == 1
