"""A checkpoint in the background and the loop: it is waited for however the run ends, its failure ends the run, its cost is reported."""

import asyncio
import logging

import pytest
from in_process_run import InProcessRun, RecordingTrainer, make_config

from moerl.train.checkpoint import checkpoint_dirs
from moerl.types.errors import CheckpointError, GuardError


class BackgroundTrainer(RecordingTrainer):
    """Writes a checkpoint only when `written` is set; from version `fails_at` on writing fails."""

    written: asyncio.Event
    fails_at = 1000

    async def save(self, version, state):
        await self.saved(wait=True)
        self.task = asyncio.create_task(self._write_later(version, self.version, state))
        if self.after_save is not None:
            self.after_save(version)

    async def _write_later(self, version, weights, state):
        await self.written.wait()
        if version >= self.fails_at:
            raise CheckpointError(f"step {version} could not be written")
        self._write(version, weights, state)

    async def saved(self, *, wait=False):
        task = getattr(self, "task", None)
        if task is not None and (wait or task.done()):
            await asyncio.wait([task])
            self.task = None
            task.result()
        return await super().saved(wait=wait)


def background_run(tmp_path, **changes):
    run = InProcessRun(make_config(tmp_path, **changes))
    run.trainer.__class__ = BackgroundTrainer
    run.trainer.written = asyncio.Event()
    return run


def versions(run):
    return [checkpoint_dirs.version_of(path) for path in checkpoint_dirs.complete(run.config.run_dir / "checkpoints")]


def test_the_end_of_a_run_waits_for_its_last_checkpoint(tmp_path):
    run = background_run(tmp_path, save_every=0)

    async def scenario():
        task = asyncio.create_task(run.play())
        run.trainer.after_save = lambda version: asyncio.get_running_loop().call_later(0.3, run.trainer.written.set)
        await task

    asyncio.run(scenario())
    assert versions(run) == [4]


def test_a_cancelled_run_waits_for_the_checkpoint_in_flight(tmp_path):
    """SIGTERM cancels it."""
    run = background_run(tmp_path, num_steps=1000, save_every=3)
    cancelled = asyncio.Event()
    run.trainer.after_save = lambda version: cancelled.set()

    async def scenario():
        task = asyncio.create_task(run.play())
        await cancelled.wait()
        task.cancel()
        assert await asyncio.wait([task], timeout=0.3) == (set(), {task})
        assert versions(run) == []
        run.trainer.written.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())
    assert versions(run) == [3]


def test_a_checkpoint_that_fails_in_the_background_ends_the_run_at_the_next_step(tmp_path):
    run = background_run(tmp_path, num_steps=1000)
    run.trainer.written.set()
    run.trainer.fails_at = 3
    with pytest.raises(CheckpointError, match="step 3 could not be written"):
        asyncio.run(run.play())
    assert versions(run) == [1, 2]
    assert max(run.groups) <= 4


class Refusing(BackgroundTrainer):
    async def update(self, *args, **kwargs):
        if self.version == 3:
            # The checkpoint fails while the run ends, not before.
            asyncio.get_running_loop().call_soon(self.written.set)
            raise GuardError("the cause")
        return await super().update(*args, **kwargs)


def test_what_ended_the_run_stays_the_cause_when_its_checkpoint_fails_too(tmp_path, caplog):
    run = background_run(tmp_path, save_every=3)
    run.trainer.__class__ = Refusing
    run.trainer.fails_at = 3
    with caplog.at_level(logging.WARNING), pytest.raises(GuardError, match="the cause"):
        asyncio.run(run.play())
    assert "step 3 could not be written" in caplog.text
    assert versions(run) == []


def test_the_step_after_a_checkpoint_reports_what_it_cost(tmp_path):
    run = background_run(tmp_path, save_every=2)
    run.trainer.written.set()
    asyncio.run(run.play())
    reported = {row["step"] for row in run.metrics() if "checkpoint/blocked_seconds" in row}
    assert reported and reported <= {3, 4}
    row = next(row for row in run.metrics() if row["step"] in reported)
    assert {"checkpoint/bytes", "checkpoint/seconds"} <= row.keys()
    assert "checkpoint of step 4: " in (run.config.run_dir / "run.log").read_text()
