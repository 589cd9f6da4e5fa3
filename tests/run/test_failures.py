"""What ends a run reaches the user as one cause, and ends every process of the run."""

import socket

from whole_runs import SYNC, assert_all_end, find, run, start, wait_for_step


def fail_by_killing(tmp_path, text):
    process = start(tmp_path, "num_steps=200")
    family = wait_for_step(process, 1)
    find(family, text).kill()
    _, stderr = process.communicate(timeout=90)
    assert_all_end(family)
    return process.returncode, stderr


def test_a_killed_rollout_server_is_named_with_its_exit_code(tmp_path):
    code, stderr = fail_by_killing(tmp_path, "moerl.rollout.hf")
    assert code == 1
    assert "127.0.0.1:" in stderr
    assert "the server ended by signal 9" in stderr
    assert "last lines of" in stderr


def test_a_killed_train_rank_is_named_with_what_it_did(tmp_path):
    code, stderr = fail_by_killing(tmp_path, "ray::TrainWorker")
    assert code == 1
    assert "rank " in stderr
    assert " failed in " in stderr


def test_a_port_in_use_is_named_before_training_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = run(tmp_path, f"rollout.port={port}")
    assert outcome.returncode == 1
    assert f"rollout.port = {port}" in outcome.stderr
    assert "in use" in outcome.stderr


def test_a_second_process_on_the_same_run_is_refused(tmp_path):
    process = start(tmp_path, "num_steps=200")
    wait_for_step(process, 1)
    outcome = run(tmp_path, "num_steps=200")
    process.terminate()
    process.communicate(timeout=60)
    assert outcome.returncode == 1
    assert f"{SYNC}: another process is training this run" in outcome.stderr


def test_rewards_that_raise_or_are_no_number_mark_samples_and_the_run_goes_on(tmp_path):
    (tmp_path / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if len(solution_str) % 3 == 0:\n        raise ValueError('no such length')\n"
        "    return float('nan') if len(solution_str) % 3 == 1 else float(ground_truth[0] in solution_str)\n"
    )
    term = f'reward.terms={{own: {{kind: function, path: "{tmp_path}/reward.py:score"}}, repeat: {{kind: prefix}}}}'
    outcome = run(tmp_path, term, "group_size=16", "num_steps=2", "rollout.max_running=64")
    assert outcome.returncode in (0, 2), outcome.stderr
    if outcome.returncode == 2:
        assert "none of its 16 samples could be scored" in outcome.stderr
    else:
        from whole_runs import rows

        assert sum(row["reward/errors"] for row in rows(tmp_path)) > 0
