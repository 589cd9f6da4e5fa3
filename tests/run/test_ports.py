"""The tables of docs/security.md are what a run opens, no more and no less."""

from whole_runs import DIGIT, listened, ports_of, start, users_environment

MAY_LACK = ("idle worker",)
"""It may have become another one before this test looks."""


def test_a_run_of_one_node_listens_where_the_page_says(tmp_path):
    process = start(tmp_path, "num_steps=2", "save_every=0", DIGIT, env=users_environment())
    found, expected = listened(process), ports_of("one node")
    assert process.returncode == 0, process.stderr.read()[-3000:]
    assert found <= expected
    assert {kind for kind, _ in expected - found} <= set(MAY_LACK)
