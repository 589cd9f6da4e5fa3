"""`moerl eval` of what a run left, with train ranks and servers: the samples of the run's own evaluation, whatever holds the weights."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from whole_runs import SMALL, SYNC, assert_all_end, left_in_shared_memory, shared_memory

import moerl
from moerl.config.load import load
from moerl.convert.conversion import Conversion, convert

pytestmark = pytest.mark.usefixtures("shared_ray")

# More than one layout and dtype is not needed: a checkpoint loads into any (tests/train/test_resharding.py).
WORDS = (
    f"recipe={SYNC}", *SMALL, "eval=tiny-repeat", "num_steps=1", "eval.datasets.repeat.num_prompts=12", "eval.datasets.repeat.samples=2",
    "eval.datasets.repeat.pass_at=[1,2]", "rollout.max_running=8", "algorithm.kl_coefficient=0.1",
    'reward.terms.repeat={kind: format, pattern: ".*[0-9].*"}',
)  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Of a run that has ended, with evaluations of its own."""
    chosen = [*WORDS, f"output_dir={tmp_path_factory.mktemp('runs')}"]

    async def cell():
        return moerl.train(moerl.load(*chosen, "eval.every=1"))

    asyncio.run(cell())  # as in a notebook, where a loop runs already
    return chosen


def samples(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "samples" / "repeat.jsonl").read_text().splitlines()]


def evaluate(words, tmp_path, checkpoint=None):
    return moerl.evaluate(moerl.load(*words), checkpoint=checkpoint, out=tmp_path / "out")


def test_a_runs_checkpoint_has_the_samples_of_the_runs_own_evaluation_and_no_rank_has_an_optimizer(words, tmp_path):
    run_dir = load(words).run_dir
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    (result,) = evaluate([*words, "train.layout.ranks=1", "train.layout.ep=1"], tmp_path)
    found = samples(tmp_path / "out")
    assert len(found) == 24 and any(record["passed"] for record in found)
    assert found == samples(run_dir / "eval" / "step-000001") != samples(run_dir / "eval" / "step-000000")
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["version"] == 1
    assert written["datasets"] == json.loads((run_dir / "eval" / "step-000001" / "results.json").read_text())["datasets"]
    assert result.passes[1].mean == sum(record["passed"] for record in found) / 24
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before, "the run's directory is the run's"


@pytest.mark.matrix
def test_a_folder_made_of_the_checkpoint_has_the_same_samples(words, tmp_path):
    run_dir = load(words).run_dir
    folder = tmp_path / "folder"
    convert(Conversion(source=run_dir / "checkpoints" / "step-000001", target=folder, files_from=run_dir / "model"), dry_run=False)
    evaluate(words, tmp_path, folder)
    assert samples(tmp_path / "out") == samples(run_dir / "eval" / "step-000001")


@pytest.mark.matrix
def test_prompts_that_leave_less_room_than_a_run_needs_are_evaluated(words, tmp_path):
    """The canary asks with them first."""
    prompts = ["data.max_prompt_tokens=1", "eval.datasets.repeat.data.max_prompt_tokens=2"]
    (result,) = evaluate([*words, *prompts, "eval.max_response_tokens=7", "model.max_context=9"], tmp_path)
    assert load(words).rollout.max_response_tokens == 8 and result.errors == 0
    assert max(record["length"] for record in samples(tmp_path / "out")) == 7


@pytest.mark.matrix
def test_an_evaluation_that_was_stopped_goes_on_where_it_was_and_leaves_nothing(words, tmp_path):
    many = ["eval.datasets.repeat.data.size=400", "eval.datasets.repeat.num_prompts=400"]
    shared = shared_memory()
    command = [sys.executable, "-m", "moerl", "eval", *words, *many, f"--out={tmp_path / 'out'}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    file = tmp_path / "out" / "samples" / "repeat.jsonl"
    while process.poll() is None and not (file.exists() and file.stat().st_size):
        psutil.wait_procs([psutil.Process(process.pid)], timeout=0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGUSR1)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 75, told
    assert told.splitlines()[-1] == "moerl: stopped: SIGUSR1; the same command continues the run"
    assert_all_end(family)
    assert left_in_shared_memory(shared) == set()
    left = file.read_text().splitlines()
    assert 0 < len(left) < 800
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "repeat" in done.stdout and done.stdout.splitlines()[-1] == f"results: {tmp_path / 'out' / 'results.json'}"
    lines = file.read_text().splitlines()
    assert (len(lines), lines[: len(left)]) == (800, left)
    assert f"repeat: {len(left) // 2} of 400 prompts are there already" in (tmp_path / "out" / "run.log").read_text()
