"""Shapes of runs beside the demo's: asynchronous DAPO, warm start, tensor parallel, several updates, gloo."""

from whole_runs import ADD, ASYNC, rows, run


def test_asynchronous_dapo_trains_on_samples_at_most_one_step_old(tmp_path):
    outcome = run(tmp_path, "sft=null", "algorithm.overlong=none", "algorithm.overlong_buffer=null", "group_size=8", recipe=ASYNC)
    assert outcome.returncode == 0, outcome.stderr
    stale = [row["staleness/max"] for row in rows(tmp_path, ASYNC)]
    assert len(stale) == 6
    assert max(stale) == 1
    assert rows(tmp_path, ASYNC)[0]["mismatch/mean"] < 1e-4


def test_a_warm_start_then_two_updates_per_step_under_tensor_parallel_over_gloo(tmp_path):
    overrides = ("sft.num_steps=3", "sft.batch_size=8", "train.layout.ep=1", "train.layout.tp=2", "train.updates_per_step=2",
                 "weights.transport=gloo", "num_steps=2")  # fmt: skip
    outcome = run(tmp_path, *overrides, recipe=ADD)
    assert outcome.returncode == 0, outcome.stderr
    assert "warm start 3/3" in outcome.stdout
    first = rows(tmp_path, ADD)[0]
    assert first["train/kl_old"] == 0.0
    assert first["mismatch/mean"] < 1e-4
    again = run(tmp_path, *overrides, "num_steps=3", recipe=ADD)
    assert again.returncode == 0, again.stderr
    assert "warm start" not in again.stdout
    assert [row["step"] for row in rows(tmp_path, ADD)] == [1, 2, 3]
