"""`moerl launch` against a real Slurm with two nodes: training, and everything that can be wrong before it."""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
from jobs import RECIPE, Job, Jobs
from two_nodes import TwoNodes

from moerl.config.schema.model_config import ScratchModel
from moerl.scratch_model import write_scratch_model
from moerl.slurm.job_node import LAST_SECONDS
from moerl.train.checkpoint.checkpoint_dirs import complete, version_of

pytestmark = pytest.mark.slurm

ON_GPUS = (
    "placement.mode=colocated", "placement.nodes=2", "placement.gpus_per_node=4", "train.offload=all", "slurm.gpus_per_node=4",
    "~train.layout", "train.layout={ranks:8,ep:2}",
)  # fmt: skip
"""There are none: nvidia_smi() says what the nodes have."""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """nvidia_smi(n0=[MODEL, ...], n1=[...], used={NODE: "PID, MIB"}): what it prints on each node."""

    def prepare(*, used: dict[str, str], **gpus: list[str]) -> None:
        lines = [
            f'"{node} --query-gpu=name") printf "{"".join(f"{gpu}|" for gpu in models)}" | tr "|" "\\n" ;;' for node, models in gpus.items()
        ]
        lines += [f'"{node} --query-compute-apps=pid,used_memory") echo "{row}" ;;' for node, row in used.items()]
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir()
        program.write_text("\n".join(["#!/bin/sh", 'case "$SLURMD_NODENAME $1" in', *lines, "esac\n"]))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    return prepare


@pytest.fixture
def foreign_ray(cluster: TwoNodes):
    """Somebody else's, with the ports and directory that Ray takes when nobody tells it otherwise."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=1"]
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as directory:  # short, for its sockets
        place = ("--node-ip-address=127.0.0.1", f"--temp-dir={directory}")
        process = cluster.start(*command, *place, node="n0", env={**os.environ, "TMPDIR": directory})
        cluster.wait_for("a foreign Ray", lambda: Path(directory, "ray_current_cluster").exists(), 120)
        yield process
        for found in cluster.processes("n0"):
            found.kill()
        process.wait()


def ray_logs_of_ranks(directory: Path, node: str) -> int:
    """Train ranks that ran on the node."""
    return sum(":actor_name:TrainWorker" in file.read_text() for file in (directory / node).glob("worker-*.out"))


def test_a_job_trains_across_two_nodes(jobs: Jobs):
    job = jobs.run()
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    assert steps_of(jobs) == [1, 2, 3, 4]
    logs = job.directory / f"{job.number}-0"
    assert [ray_logs_of_ranks(logs, node) for node in ("n0", "n1")] == [1, 1]
    assert not (logs / "meeting.json").exists(), "it holds the job's token"
    (log,) = jobs.output_dir.glob("*/run.log")
    assert "weights go by relay" in log.read_text(), "from each rank to the server on its own node"


def test_a_job_of_one_node_trains(jobs: Jobs):
    """Ray is given a loopback, and registers the node by another address."""
    job = jobs.run("placement.nodes=1", "train.layout.ranks=1", "train.layout.ep=1", "slurm.preflight=true")
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    assert steps_of(jobs) == [1, 2, 3, 4]


def steps_of(jobs: Jobs) -> list[int]:
    """That the run has told of."""
    return [json.loads(line)["step"] for file in jobs.output_dir.glob("*/metrics.jsonl") for line in file.read_text().splitlines()]


def newest_step(jobs: Jobs) -> int:
    """Of the complete checkpoints; 0 without any."""
    return max((version_of(directory) for root in jobs.output_dir.glob("*/checkpoints") for directory in complete(root)), default=0)


def failed(job: Job, *said: str, code: int = 1) -> None:
    assert (job.state, job.exit_code) == ("FAILED", code), job.log
    for words in said:
        assert words in job.log
    assert "Traceback" not in job.log, job.log


def test_the_drivers_exit_code_is_the_jobs_and_another_ray_on_the_node_is_left_alone(jobs: Jobs, foreign_ray):
    rows = jobs.output_dir.parent / "rows.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "1"}], "reward_model": {"ground_truth": "1"}}\n')
    number = jobs.submit("~data", f"data={{kind:files,files:[{rows}],max_prompt_tokens:8,chat_template:false}}")
    rows.unlink()  # only the driver reads it, long after the nodes have met
    failed(jobs.end(number), "another Ray runs here (raylet of root, pid", "Ray runs on 2 nodes", "rows.jsonl", code=2)
    assert foreign_ray.poll() is None


def test_a_node_that_does_not_come_is_named(jobs: Jobs, tmp_path: Path):
    absent = jobs.python_that('[ "$SLURMD_NODENAME" = n1 ] && exec sleep 600')
    script, log = tmp_path / "job.sbatch", tmp_path / "job.out"
    # Slurm has to kill what n1 does instead; sooner here than a node may take to end.
    script.write_text(jobs.launch(absent, "slurm.start_seconds=5", "--dry-run").stdout.replace(f"--wait={LAST_SECONDS:.0f}", "--wait=3"))
    done = jobs.cluster.run("sbatch", "--wait", f"--output={log}", script)
    assert done.returncode == 137, "of n1"
    assert "n1 did not come within slurm.start_seconds = 5" in log.read_text()


@pytest.mark.matrix(turn=0)
def test_a_job_that_loses_a_node_is_queued_again_and_goes_on(jobs: Jobs):
    number = jobs.submit("num_steps=100")
    jobs.cluster.wait_for("a checkpoint", lambda: newest_step(jobs) > 0, 240)
    jobs.cluster.power_off("n1")
    jobs.cluster.wait_for("the job in the queue again", lambda: jobs.field(number, "Restarts") == "1", 180)
    # Slurm may have noticed before the first node, which then still has its end before it.
    jobs.cluster.wait_for("the end of its processes", lambda: jobs.field(number, "JobState") == "PENDING", 120)
    saved = newest_step(jobs)
    assert saved < 100
    jobs.cluster.power_on("n1")
    assert any(left.name.startswith(f"moerl-{number}-0-1-") for left in jobs.node_disk.iterdir()), "of the node that lost its power"
    jobs.start_again(number)
    job = jobs.end(number, 300)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    by_the_first_node = "n1 is gone" in job.log and "queued again and goes on from the newest checkpoint" in job.log
    assert by_the_first_node or "DUE TO NODE FAILURE" in job.log, job.log
    assert sorted(set(steps_of(jobs))) == list(range(1, 101))


@pytest.mark.matrix
def test_a_job_that_loses_a_node_goes_on_without_it_where_there_is_another(jobs: Jobs):
    number = jobs.submit("num_steps=60")
    jobs.cluster.wait_for("a checkpoint", lambda: newest_step(jobs) > 0, 240)
    jobs.cluster.add_spare()
    try:
        (node_process,) = [found for found in jobs.cluster.processes("n1") if found.cmdline()[1:4] == ["-m", "moerl", "node"]]
        node_process.kill()
        jobs.cluster.wait_for("the job in the queue again", lambda: jobs.field(number, "Restarts") == "1", 180)
        jobs.cluster.wait_for("n1 excluded", lambda: jobs.field(number, "ExcNodeList") == "n1", 60)
        jobs.cluster.wait_for("the end of its processes", lambda: jobs.field(number, "JobState") == "PENDING", 60)
        # slurmd starts nothing of a job in the seconds in which it was told to end it.
        ended = time.time()
        jobs.cluster.wait_for("a later second", lambda: time.time() > ended + 3)
        for left in jobs.node_disk.glob(f"moerl-{number}-0-1-*"):  # on a node to which the job does not come back
            shutil.rmtree(left)
        jobs.start_again(number)
        job = jobs.end(number, 300)
        assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
        assert "n1 is to be excluded (1 of slurm.max_excluded = 2)" in job.log
        assert "excluded from now on: n1" in job.log
        assert jobs.field(number, "NodeList") == "n[0,2]"
        assert sorted(set(steps_of(jobs))) == list(range(1, 61))
        assert not Path(f".moerl-{number}.lost").exists()
        jobs.assert_nothing_is_left()
    finally:
        jobs.cluster.remove_spare()


@pytest.mark.matrix(turn=0)
def test_a_cancelled_job_saves_its_last_step_and_is_not_queued_again(jobs: Jobs):
    number = jobs.submit("num_steps=100000", "save_every=0")
    jobs.cluster.wait_for("a step", lambda: bool(steps_of(jobs)), 240)
    assert len(jobs.processes()) > 10
    jobs.cluster.run("scancel", number)
    job = jobs.end(number, 120)
    assert job.state == "CANCELLED", job.log
    assert newest_step(jobs) == steps_of(jobs)[-1], job.log


@pytest.mark.matrix(turn=1)
def test_a_job_whose_time_is_up_saves_is_queued_again_and_goes_on(jobs: Jobs):
    number = jobs.submit("num_steps=60", "save_every=0")
    jobs.cluster.wait_for("a step", lambda: bool(steps_of(jobs)), 240)
    # As --signal=USR1@SECONDS does that long before the time limit.
    jobs.cluster.run("scancel", "--signal=USR1", number)
    jobs.cluster.wait_for("the job in the queue again", lambda: jobs.field(number, "Restarts") == "1", 120)
    saved = len(steps_of(jobs))
    assert 0 < saved < 60
    jobs.start_again(number)
    job = jobs.end(number, 300)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    assert steps_of(jobs) == list(range(1, 61)), "no step is lost, none is taken twice"
    assert "stopped: SIGUSR1; the same command continues the run" in job.log
    assert (job.directory / f"{number}-1").is_dir()


@pytest.mark.matrix
def test_an_evaluation_whose_time_is_up_is_queued_again_and_goes_on(jobs: Jobs):
    model = jobs.output_dir.parent / "model"
    write_scratch_model(ScratchModel(num_layers=2, hidden_size=32, num_experts=4), 32, model, 0)
    prompts = ("eval.datasets.repeat.data.size=1000", "eval.datasets.repeat.num_prompts=1000")
    number = jobs.submit("--eval", f"--checkpoint={model}", "eval=tiny-repeat", *prompts)
    evaluation = jobs.output_dir / RECIPE.removeprefix("recipe=") / "eval" / "checkpoint-model"
    samples = evaluation / "samples" / "repeat.jsonl"
    jobs.cluster.wait_for("a sample", lambda: samples.exists() and samples.stat().st_size > 0, 240)
    jobs.cluster.run("scancel", "--signal=USR1", number)
    jobs.cluster.wait_for("the job in the queue again", lambda: jobs.field(number, "Restarts") == "1", 120)
    left = samples.read_text().splitlines()
    assert 0 < len(left) < 4000
    jobs.start_again(number)
    job = jobs.end(number, 300)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    lines = samples.read_text().splitlines()
    assert (len(lines), lines[: len(left)]) == (4000, left)
    assert json.loads((evaluation / "results.json").read_text())["datasets"]["repeat"]["num_prompts"] == 1000
    assert f"results: {evaluation}/results.json" in job.log
    jobs.assert_nothing_is_left()


def test_an_allocation_with_too_few_gpus_is_refused_before_anything_starts(jobs: Jobs, nvidia_smi):
    nvidia_smi(n0=["H100"] * 4, n1=["H100"] * 4, used={})
    script, log = jobs.output_dir.parent / "job.sbatch", jobs.output_dir.parent / "job.out"
    script.write_text(jobs.launch("--dry-run", on=ON_GPUS).stdout)
    done = jobs.cluster.run("sbatch", "--wait", "--nodes=1", f"--output={log}", script)
    assert done.returncode == 1
    said = "the recipe needs 8 GPUs, and the allocation has 4: 1 node (n0) of 4"
    assert said in log.read_text()


@pytest.mark.parametrize(
    ("n0", "n1", "used", "said"),
    [
        (4, 3, {}, ("the recipe needs 8 GPUs, and the allocation has 7", "but 3 GPUs on 1 node (n1)")),
        (4, "A100", {}, ("GPUs of different models", "A100 on 1 node (n1); H100 on 1 node (n0)")),
        (4, 4, {"n1": "4711, 70000 MiB"}, ("n1: GPU memory is in use", "pid 4711, 70000 MiB")),
    ],
    ids=["fewer", "mixed", "used"],
)
def test_nodes_that_cannot_run_the_job_are_named(jobs: Jobs, nvidia_smi, n0, n1, used, said):
    nvidia_smi(n0=["H100"] * n0, n1=["A100"] * 4 if n1 == "A100" else ["H100"] * n1, used=used)
    failed(jobs.run(on=ON_GPUS), "these nodes cannot run the job", *said)


def test_a_node_that_cannot_write_the_runs_directory_is_named(jobs: Jobs):
    jobs.output_dir.mkdir()
    read_only = f"mount --bind {jobs.output_dir} {jobs.output_dir}; mount -o remount,ro,bind {jobs.output_dir}"
    jobs.cluster.run("sh", "-ec", read_only, node="n1")
    try:
        failed(jobs.run(), "n1: ", "cannot be written (Read-only file system); output_dir= must be on storage that all nodes can write")
    finally:
        jobs.cluster.run("umount", jobs.output_dir, node="n1")


def test_the_log_is_where_launch_says_it_is_also_in_a_directory_with_a_percent_sign(jobs: Jobs):
    done = jobs.launch(f"output_dir={jobs.output_dir}/50%j-a%%b", jobs.python_that("echo started; exit 3"))
    number, log = done.stdout.split()[1].rstrip(":"), Path(done.stdout.strip().partition("log ")[2])
    jobs.cluster.wait_for("the job's end", lambda: jobs.field(number, "JobState") == "FAILED")
    assert "started" in log.read_text()


def test_slurms_own_words_are_kept_when_it_refuses(jobs: Jobs):
    done = jobs.launch("slurm.partition=nowhere")
    assert done.returncode == 1
    assert "sbatch refused the job" in done.stderr
    assert "invalid partition specified: nowhere" in done.stderr


def test_without_munge_slurms_own_words_are_kept(jobs: Jobs, tmp_path: Path):
    conf = (jobs.cluster.root / "slurm.conf").read_text().replace("munge.sock", "nobody-listens.sock")
    (tmp_path / "slurm.conf").write_text(conf)
    done = jobs.launch(env={**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")})
    assert done.returncode == 1
    assert "sbatch refused the job" in done.stderr
    assert "nobody-listens.sock" in done.stderr


def test_a_container_whose_python_has_no_moerl_fails_with_pythons_words(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Stands for apptainer, which is not installed: it runs what follows the image.
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nwhile [ "$1" != /image.sif ]; do shift; done\nshift\nexec "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    container = ("slurm.container={kind:apptainer,image:/image.sif}", "slurm.pass_environment=[]")
    failed(jobs.run("slurm.python=/usr/bin/python3", *container), "/usr/bin/python3: No module named moerl")
