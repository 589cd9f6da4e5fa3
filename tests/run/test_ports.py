"""The tables of docs/security.md are what a run opens, no more and no less."""

from whole_runs import DIGIT, listened, ports_of, start, users_environment

MAY_LACK = ("idle worker", "dashboard", "dashboard agent")
"""An idle worker may have become another one before this test looks. The last two come late, and their ports are fixed: another Ray of
this machine may have them."""


def test_a_run_of_one_node_listens_where_the_page_says(tmp_path):
    process = start(tmp_path, "num_steps=2", "save_every=0", DIGIT, env=users_environment())
    found, expected = listened(process), ports_of("one node")
    assert process.returncode == 0, process.stderr.read()[-3000:]
    assert found <= expected
    assert {kind for kind, _ in expected - found} <= set(MAY_LACK)
