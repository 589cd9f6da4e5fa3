"""A run on a Ray cluster of two nodes that loses one, a raylet of its own with all below it."""

from contextlib import suppress

import psutil
import pytest
from whole_runs import DIGIT, assert_all_end, below, rows, start, wait_for_step, words_of

SERVERS_APART = (
    DIGIT, "placement.mode=separate", "placement.nodes=2", "placement.gpus_per_node=3", "rollout.num_servers=2", "weights.transport=nccl",
)  # fmt: skip
"""Both ranks and a server on the first node, a server on the second."""


@pytest.mark.matrix
def test_a_run_goes_on_without_a_node_of_servers_alone(tmp_path, raylets):
    """With it go its server, which cannot come back, and its collector with what that held."""
    process = start(tmp_path, *SERVERS_APART)
    wait_for_step(process, 2)
    ranks_and_collectors = [len(below(raylet, name)) for name in ("TrainWorker", "CollectorActor") for raylet in raylets]
    lost = raylets[1].children(recursive=True)
    assert ranks_and_collectors == [2, 0, 1, 1] and below(raylets[1], "moerl.rollout.engines.hf")
    for each in (raylets[1], *lost):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors[-3000:]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert_all_end([*lost, *(each for each in raylets[0].children(recursive=True) if "moerl" in words_of(each))])
