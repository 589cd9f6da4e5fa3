"""A run with one server over the two nodes of a Ray cluster, which loses the server's process on the second of them."""

import signal

import psutil
import pytest
from whole_runs import DIGIT, SYNC, assert_all_end, below, left_in_shared_memory, rows, shared_memory, start, wait_for_step

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

ENGINES = {"sglang": ("sgl", "INFO sglang.srt.entrypoints.engine: server_args"), "vllm": ("psm_", "Resolved architecture: ")}
"""How the names of its files in /dev/shm begin, and what it writes once when it starts."""
SPREAD = (
    DIGIT, "rollout.layout={gpus: 2, gpus_per_node: 1}", "rollout.num_servers=1", "rollout.prefill_chunk=128",
    "train.offload=all", "placement.mode=colocated", "placement.nodes=2", "placement.gpus_per_node=1",
    "deterministic=false", "save_every=0", "num_steps=3", "weights.bucket_bytes=100000", "weights.disk_delta=false",
    "deadlines.probe_seconds=10",
)  # fmt: skip


def with_children(processes):
    return [each for process in processes for each in (process, *process.children(recursive=True))]


@pytest.mark.parametrize(("engine", "transport"), [("sglang", "auto"), ("sglang", "disk"), ("vllm", "auto")])
def test_a_server_over_two_nodes_that_loses_a_follower_is_started_again_whole(tmp_path, raylets, engine, transport):
    files, says_once = ENGINES[engine]
    before = shared_memory()
    replay = "rollout" if engine == "sglang" else "off"
    process = start(tmp_path, *SPREAD, f"rollout.engine={engine}", f"train.router_replay={replay}", f"weights.transport={transport}")
    wait_for_step(process, 1)
    server = f"moerl.rollout.engines.{engine}.{engine}_server"
    (follower,), heads = below(raylets[1], server), below(psutil.Process(process.pid), server)
    family = with_children([follower, *heads])
    assert "--node-rank 1 --head 127.0.0.2" in " ".join(follower.cmdline()) and not below(raylets[0], server)
    assert len(family) > len(heads) + 1, "the engine has processes of its own on both nodes"
    follower.send_signal(signal.SIGKILL)
    _, said = process.communicate(timeout=400)
    assert process.returncode == 0, said[-3000:]
    metrics = rows(tmp_path)
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(row["mismatch/mean"] < 1e-6 for row in metrics)
    assert engine == "vllm" or all(row["routing/overlap"] == 1.0 for row in metrics)
    assert metrics[-1]["fleet/restarts"] == 1
    driver, log = (tmp_path / SYNC / "run.log").read_text(), tmp_path / SYNC / "logs" / "rollout-0-node1.log"
    assert "the process on node 1 of its 2 nodes (127.0.0.3) ended first" in driver and f"last lines of {log}" in driver
    assert log.read_text().count(says_once) == 2, "what the first process wrote is kept"
    assert_all_end(family)
    for node in raylets:
        assert not below(node, engine)
    assert left_in_shared_memory(before, files) == set()
