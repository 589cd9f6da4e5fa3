"""When a job's first node asks for the job to be queued again, and when no longer."""

import asyncio
import signal
from pathlib import Path

import pytest

from moerl.config.load import load
from moerl.slurm.allocation import AllocatedNode, JobPlace
from moerl.slurm.job_node import _Node
from moerl.types.errors import MoerlError, RunStopped
from moerl.types.exit_codes import ExitCode


class Ended(_Node):
    """A node whose driver has ended with the code for "continue", after it saved a step if `saves`."""

    saves = False

    async def _lead(self, arguments):
        if self.saves and self._evaluation is None:
            (self._config.run_dir / "checkpoints" / "step-7").mkdir(parents=True)
        elif self.saves:
            directory = self._config.run_dir / "eval" / "checkpoint-7"
            directory.mkdir(parents=True)
            (directory / "samples.jsonl").write_text("{}\n")
        return ExitCode.QUEUE_AGAIN

    def _saved(self):
        return super()._saved() if self._evaluation is not None else next((self._config.run_dir / "checkpoints").glob("*"), None)


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Starting(Ended):
    """A node that is told that its time is over before there is a driver."""

    async def _lead(self, arguments):
        signal.raise_signal(signal.SIGUSR1)
        await asyncio.sleep(60)


def ended(tmp_path: Path, job: str, *, saves: bool, evaluation: list[str] | None = None, kind: type[Ended] = Ended) -> int:
    config = load(["recipe=grpo-tiny-moe-1n2g-sync", f"output_dir={tmp_path}"])
    facts = AllocatedNode(name="n0", gpus=(), num_cpus=1, versions={})
    place = JobPlace(job=job, index=0, names=("n0",))
    node = kind(config, place, facts, log=tmp_path / "n0.log", directory=tmp_path, marks=None, evaluation=evaluation)
    node.saves = saves
    return asyncio.run(node.run([]))


@pytest.mark.parametrize(("job", "saves"), [("7-0", False), ("7-0", True), ("7-3", True)])
def test_a_run_that_is_to_be_continued_is_queued_again(tmp_path: Path, job: str, saves: bool):
    assert ended(tmp_path, job, saves=saves) == ExitCode.QUEUE_AGAIN


def test_an_evaluation_that_gained_samples_is_queued_again(tmp_path: Path):
    assert ended(tmp_path, "7-3", saves=True, evaluation=[]) == ExitCode.QUEUE_AGAIN
    with pytest.raises(MoerlError, match="was saved since"):
        ended(tmp_path, "7-4", saves=False, evaluation=[])


def test_a_run_that_came_back_and_saved_nothing_is_not_queued_for_ever(tmp_path: Path):
    with pytest.raises(MoerlError, match="was saved since"):
        ended(tmp_path, "7-1", saves=False)


def test_a_job_whose_time_is_over_before_it_trains_is_not_queued_for_ever(tmp_path: Path):
    with pytest.raises(RunStopped) as first:
        ended(tmp_path, "7-0", saves=False, kind=Starting)
    assert first.value.exit_code == ExitCode.QUEUE_AGAIN
    with pytest.raises(MoerlError, match="nothing was saved since"):
        ended(tmp_path, "7-1", saves=False, kind=Starting)
