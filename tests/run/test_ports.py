"""The tables of docs/security.md are what a run opens, no more and no less."""

from whole_runs import DIGIT, listened, ports_of, start

FOR_A_MOMENT = {("idle worker", "all")}
"""Before it is another one: it may be gone when this test looks."""


def test_a_run_of_one_node_listens_where_the_page_says(tmp_path):
    process = start(tmp_path, "num_steps=2", "save_every=0", DIGIT)
    found = listened(process)
    assert process.returncode == 0, process.stderr.read()[-3000:]
    assert found - FOR_A_MOMENT == ports_of("one node") - FOR_A_MOMENT
