"""Another job takes a run's nodes: the run saves in the grace time, is queued again, and goes on where it was, with the same prompts."""

import pytest
from jobs import Jobs
from kill_series import prompts

pytestmark = pytest.mark.slurm

STEPS = ("save_every=0", "observe.dump_every=1", "observe.dump_groups=4")


@pytest.mark.matrix
def test_a_job_that_another_one_preempts_saves_is_queued_again_and_goes_on(jobs: Jobs):
    number = jobs.submit(*STEPS, "num_steps=40")
    jobs.cluster.wait_for("a step", lambda: bool(prompts(jobs)), 240)
    urgent = jobs.cluster.run("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    assert urgent.returncode == 0, urgent.stderr
    jobs.cluster.wait_for("the job in the queue again", lambda: jobs.field(number, "JobState") == "PENDING", 180)
    saved = len(prompts(jobs))
    assert 0 < saved < 40
    jobs.cluster.wait_for("the other job's end", lambda: jobs.field(urgent.stdout.strip(), "JobState") == "COMPLETED", 120)
    jobs.start_again(number)
    job = jobs.end(number, 300)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    assert "stopped: SIGUSR1; the same command continues the run" in job.log
    trained = [index for step, shown in sorted(prompts(jobs).items()) for index, _ in shown]
    assert trained == [index for index in range(40 * 4) for _ in range(4)], "the order in which they are drawn"
