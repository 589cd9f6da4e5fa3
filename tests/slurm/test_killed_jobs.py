"""Jobs that lose a process to SIGKILL, and one whose driver cannot end: each is queued again and goes on."""

import shutil

import psutil
import pytest
from jobs import Jobs
from kill_series import kind_of, series
from test_slurm import newest_step
from two_nodes import TwoNodes

pytestmark = [pytest.mark.slurm, pytest.mark.matrix]


def test_jobs_that_lose_a_random_process_finish_with_the_same_data(cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", "/tmp")  # each job has its own, and the next test this one
    for each in series(cluster, numbers=range(1, 4), seed=0, keep=None):
        assert each.faults == (), each


def test_a_first_node_whose_driver_does_not_end_still_queues_the_job_again(jobs: Jobs):
    number = jobs.submit("num_steps=100000")
    jobs.cluster.wait_for("a checkpoint", lambda: newest_step(jobs) > 0, 240)
    of_kind: dict[str, psutil.Process] = {kind_of(process): process for process in jobs.cluster.processes("n0")}
    of_kind["driver"].suspend()
    (node_process,) = [found for found in jobs.cluster.processes("n1") if kind_of(found) == "node process"]
    node_process.kill()
    jobs.cluster.wait_for("the job in the queue again", lambda: jobs.field(number, "Restarts") == "1", 180)
    jobs.cluster.wait_for("the end of its processes", lambda: jobs.field(number, "JobState") == "PENDING", 120)
    (log,) = jobs.output_dir.glob(f"*/slurm/{number}.out")
    assert "n1 is gone" in log.read_text()
    left = [path.name for path in jobs.node_disk.iterdir()]
    assert all(name.startswith(f"moerl-{number}-0-1-") for name in left), "of n1 alone, whose process was killed"
    jobs.cluster.run("scancel", number)
    for name in left:
        shutil.rmtree(jobs.node_disk / name)
