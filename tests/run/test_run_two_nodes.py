"""A run on a Ray cluster of two nodes, which are two raylets with addresses of their own on this machine."""

import signal

import psutil
import pytest
from whole_runs import DIGIT, SYNC, assert_all_end, below, find, listened, ports_of, rows, start, wait_for_step

TWO_NODES = (
    DIGIT, "placement.mode=colocated", "placement.nodes=2", "placement.gpus_per_node=1", "train.offload=all", "rollout.num_servers=2",
    "weights.transport=nccl", "network.variables={NCCL_DEBUG: WARN}",
)  # fmt: skip


@pytest.mark.matrix
def test_ranks_and_servers_are_on_both_nodes_and_a_server_of_the_other_one_comes_back(tmp_path, raylets):
    process = start(tmp_path, *TWO_NODES)
    family = wait_for_step(process, 1)
    assert [len(below(raylet, name)) for name in ("TrainWorker", "CollectorActor") for raylet in raylets] == [1, 1, 1, 1]
    far = below(raylets[1], "moerl.rollout.engines.hf")
    assert len(far) == 1 and not below(raylets[0], "moerl.rollout.engines.hf")
    assert "--host 127.0.0.3" in " ".join(far[0].cmdline())
    near = find(family, "moerl.rollout.engines.hf")
    assert psutil.Process(near.ppid()).ppid() == process.pid and "--host 127.0.0.2" in " ".join(near.cmdline())
    assert [server.environ()["NCCL_DEBUG"] for server in (near, *far)] == ["WARN", "WARN"]
    far[0].send_signal(signal.SIGKILL)
    found = listened(process, *raylets)
    assert process.returncode == 0, process.stderr.read()[-3000:]
    expected = ports_of("several nodes") - ports_of("one node")
    assert found - ports_of("one node") <= expected
    # Ray's own come late, and their ports are fixed: another Ray of this machine may have them.
    assert {kind for kind, _ in expected - found} <= {"dashboard", "dashboard agent"}
    metrics = rows(tmp_path)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert metrics[-1]["fleet/restarts"] == 1
    assert_all_end([*far, near])
    for raylet in raylets:
        assert not below(raylet, "moerl.rollout.engines.hf")


@pytest.mark.matrix
def test_a_server_of_the_other_node_ends_with_a_driver_that_is_killed(tmp_path, raylets):
    process = start(tmp_path, *TWO_NODES)
    family = wait_for_step(process, 1)
    servers = [*below(raylets[1], "moerl.rollout.engines.hf"), find(family, "moerl.rollout.engines.hf")]
    assert len(servers) == 2
    process.kill()
    process.wait()
    assert_all_end(servers)


def test_nodes_that_are_missing_are_counted_before_anything_starts(tmp_path, raylets):
    process = start(tmp_path, *TWO_NODES, "placement.nodes=3")
    assert process.wait(timeout=120) == 2
    said = process.stderr.read()
    assert "placement.nodes = 3: must be there" in said and "the Ray cluster has 2 nodes" in said
    assert not (tmp_path / SYNC / "logs").exists()
