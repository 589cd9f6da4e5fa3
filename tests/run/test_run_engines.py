"""Whole runs whose samples come from SGLang, in its own environment: verified pushes, replayed routes, killed servers."""

import signal
from statistics import fmean

import pytest
from whole_runs import DIGIT, SMALL, SYNC, assert_all_end, rows, run, shared_memory

from moerl import run as in_process
from moerl.check import load_checked

pytestmark = pytest.mark.engine

NUM_STEPS = 3
SGLANG = (
    "rollout.engine=sglang", "rollout.prefill_chunk=128", "deterministic=false", "save_every=0", f"num_steps={NUM_STEPS}",
    "weights.bucket_bytes=100000", DIGIT,
)  # fmt: skip
"""A push of half a megabyte has several buckets."""
BFLOAT16 = ("train.dtype=bfloat16", "weights.mismatch_limit=0.2", "groups_per_step=16", "model.scratch.num_layers=4")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The rows of a run in float32 that replays SGLang's routes."""
    return train_alone(tmp_path_factory.mktemp("undisturbed"), "train.router_replay=rollout")


def train_alone(output_dir, *overrides):
    ended = run(output_dir, *SGLANG, *overrides, seconds=400)
    assert ended.returncode == 0, ended.stderr
    assert_no_file_of_sglang_is_left()
    found = rows(output_dir)
    assert [row["step"] for row in found] == list(range(1, NUM_STEPS + 1))
    return found


def assert_no_file_of_sglang_is_left():
    assert [name for name in shared_memory() if "sgl" in name] == []


def test_after_every_push_sglang_has_the_trainers_logprobs_and_routes(undisturbed):
    assert all(row["mismatch/mean"] < 1e-6 and row["mismatch/max"] < 1e-5 for row in undisturbed)
    assert all(row["routing/overlap"] == 1.0 and row["routing/replayed"] > 0.8 for row in undisturbed)
    assert all(row["train/grad_norm"] > 0.1 for row in undisturbed)


def test_replay_narrows_the_mismatch_where_rounding_changes_routes(tmp_path):
    replayed = train_alone(tmp_path / "replayed", *BFLOAT16, "train.router_replay=rollout")
    free = train_alone(tmp_path / "free", *BFLOAT16)
    assert all(0.9 < row["routing/overlap"] < 1.0 for row in replayed)
    assert not any("routing/overlap" in row for row in free)
    assert fmean(row["mismatch/mean"] for row in replayed) <= fmean(row["mismatch/mean"] for row in free)


@pytest.mark.parametrize(("when", "transport"), [("generation", "shm"), ("push", "gloo")])
def test_a_killed_server_comes_back_with_verified_weights(undisturbed, tmp_path, strike, when, transport):
    """kill -9 in the second step: SGLang's own processes end with the server, and every step has its samples once."""
    struck = strike(when, signal.SIGKILL)
    overrides = (*SMALL, *SGLANG, "train.router_replay=rollout", "deadlines.probe_seconds=5", f"weights.transport={transport}")
    in_process.train(load_checked([f"recipe={SYNC}", *overrides, f"output_dir={tmp_path}"]))
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, NUM_STEPS + 1))
    assert [row["tokens/response"] for row in found] == [row["tokens/response"] for row in undisturbed]
    assert all(row["mismatch/mean"] < 1e-6 and row["routing/overlap"] == 1.0 for row in found)
    assert (found[-1]["fleet/restarts"], struck.pools[0].fleet.members[0].num_starts) == (1.0, 2)
    assert len(struck.family) > 2, "SGLang has processes of its own"
    assert_all_end(struck.family)
    assert_no_file_of_sglang_is_left()
