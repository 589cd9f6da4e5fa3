"""A run that is asked to end saves its last step, and the run that continues it trains what one never stopped would have."""

import asyncio
import math
import signal
import sys
import time
from dataclasses import replace

import pytest
from in_process_run import InProcessRun, make_config, new_engine, play

from moerl.config.schema.rollout_config import RolloutConfig
from moerl.rollout.engines.fake_engine import FakeEngine
from moerl.rollout.fleet import fleet
from moerl.run_stop import Stop, asked_to_stop, run_until_done
from moerl.train.checkpoint import checkpoint_dirs
from moerl.types.errors import ConfigError, RunStopped, WeightError
from moerl.types.exit_codes import ExitCode


def newest(config):
    directory = checkpoint_dirs.newest(config.run_dir / "checkpoints")
    return 0 if directory is None else int(directory.name.removeprefix("step-"))


def stopped_in(config, phase, version):
    """A run asked to end while it updates to `version`, or while the groups of the step after `version` are drawn."""
    run = InProcessRun(config)

    async def scenario():
        async def while_updating():
            if run.trainer.version == version - 1:
                run.stop.ask("SIGTERM", ExitCode.TERMINATED)

        def score(prompt, text):
            if run.trainer.version == version:
                run.stop.ask("SIGTERM", ExitCode.TERMINATED)
            return original(prompt, text)

        if phase == "update":
            run.trainer.while_updating = while_updating
        else:
            original, run._rewards._function = run._rewards._function, score
        await run.play()

    with pytest.raises(RunStopped) as stopped:
        asyncio.run(scenario())
    assert stopped.value.exit_code == ExitCode.TERMINATED
    return run


@pytest.mark.parametrize("phase", ["update", "rollout"])
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_asked_to_end_saves_its_last_step_and_goes_on_with_the_next_prompt(tmp_path, phase, max_staleness):
    config = make_config(tmp_path, num_steps=8, save_every=5, max_staleness=max_staleness)
    whole = play(replace(config, name="whole"))
    first = stopped_in(replace(config, name="stopped"), phase, 3)
    # One that is asked in the canary of a step with old tokens alone trains that step.
    assert newest(first.config) in ((3, 4) if (phase, max_staleness) == ("rollout", 2) else (3,))
    resumed = play(first.config)
    assert first.trained() | resumed.trained() == whole.trained()
    assert first.groups.keys().isdisjoint(resumed.groups)


@pytest.fixture
def quick(monkeypatch):
    """No server ends with a push that fails here: nobody waits for the news."""
    monkeypatch.setattr(fleet, "LOSS_SECONDS", 0.1)


class FailsOnceBack(FakeEngine):
    """Ends in step 3; the push to the one that takes its place fails, after the run was asked to end."""

    num_starts = 0

    async def start(self):
        await super().start()
        self.num_starts += 1

    async def begin(self, manifest):
        await super().begin(manifest)
        if self.num_starts > 1:
            self.run.stop.ask("SIGTERM", ExitCode.TERMINATED)
            await asyncio.sleep(0.01)
            raise WeightError("another digest")

    async def generate(self, prompt_ids, sampling, request_id):
        if self.run.trainer.version == 2 and self.num_starts == 1 and not request_id.startswith("canary"):
            self.kill()
        return await super().generate(prompt_ids, sampling, request_id)


def test_a_push_that_fails_while_the_run_ends_is_the_cause(tmp_path, quick):
    """And not the GPUs that the trainer cannot have for a checkpoint."""
    engine = new_engine("fake-0", FailsOnceBack)
    config = make_config(tmp_path, save_every=0, rollout=RolloutConfig(engine="fake", max_response_tokens=16, max_restarts=2))
    engine.run = run = InProcessRun(config, engines=[engine])
    with pytest.raises(WeightError, match="another digest"):
        asyncio.run(run.play())
    assert list(run.groups) == [1, 2]


def test_a_push_that_fails_while_a_run_ends_that_has_saved_its_last_step_changes_nothing(tmp_path, quick, caplog):
    """It is to be queued again, as without the push."""
    engine = new_engine("fake-0", FailsOnceBack)
    config = make_config(tmp_path, save_every=1, rollout=RolloutConfig(engine="fake", max_response_tokens=16, max_restarts=2))
    engine.run = run = InProcessRun(config, engines=[engine])
    with pytest.raises(RunStopped, match="SIGTERM"):
        asyncio.run(run.play())
    assert checkpoint_dirs.newest(config.run_dir / "checkpoints").name == "step-000002" and "another digest" in caplog.text


def test_a_second_signal_does_not_break_off_the_update_or_the_save(tmp_path):
    run = InProcessRun(make_config(tmp_path, save_every=0))

    async def while_updating():
        for _ in range(3):
            run.stop.ask("SIGTERM", ExitCode.TERMINATED)
            await asyncio.sleep(0)

    run.trainer.while_updating = while_updating
    run.trainer.after_save = lambda version: run.stop.ask("SIGKILL is near")
    with pytest.raises(RunStopped, match="SIGTERM"):
        asyncio.run(run.play())
    assert newest(run.config) == 1


def test_a_step_that_was_saved_is_not_saved_again(tmp_path):
    run = InProcessRun(make_config(tmp_path, num_steps=8, save_every=2))
    saves = []

    def after_save(version):
        saves.append(version)
        if version == 4:
            run.stop.ask("SIGTERM", ExitCode.TERMINATED)

    run.trainer.after_save = after_save
    with pytest.raises(RunStopped):
        asyncio.run(run.play())
    assert saves == [2, 4]


def test_a_run_without_time_for_a_step_takes_none_and_writes_no_checkpoint(tmp_path):
    run = InProcessRun(make_config(tmp_path), ends_at=time.time() + 0.5)  # 1 s is kept for the checkpoint
    with pytest.raises(RunStopped, match="for the last checkpoint") as stopped:
        asyncio.run(run.play())
    assert stopped.value.exit_code == ExitCode.CONTINUE
    assert run.groups == {}
    assert newest(run.config) == 0


class Clock:
    """Says what a test sets."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


async def nothing():
    return "done"


@pytest.mark.parametrize("step_of_the_wall_clock", [0.0, 3600.0, -3600.0])
def test_no_step_begins_that_would_end_after_the_time_is_over(monkeypatch, step_of_the_wall_clock):
    async def scenario():
        clock, wall = Clock(), Clock(1e9)
        monkeypatch.setattr(time, "time", wall)
        stop = Stop(10.0, ends_at=1e9 + 100.0, now=clock)
        wall.now += step_of_the_wall_clock  # whoever sets it
        for clock.now in (0.0, 30.0, 50.0, 60.0):  # the longest step took 30 s, 30 s are left beside the reserve
            assert await stop.unless(nothing()) == "done"
        clock.now = 61.0
        with pytest.raises(RunStopped, match="39 s left, 10 s of them for the last checkpoint; a step took up to 30 s"):
            await stop.unless(nothing())

    asyncio.run(scenario())


def test_work_that_waits_is_cancelled_when_the_time_is_over():
    async def scenario():
        task = asyncio.create_task(asyncio.Event().wait())
        with asked_to_stop(0.0, ends_at=time.time() + 0.01) as stop, pytest.raises(RunStopped):
            await stop.unless(task)
        assert task.cancelled()

    asyncio.run(scenario())


def test_a_start_that_lasts_until_the_time_is_over_ends_before_the_first_step():
    """As one with a long warm start."""

    async def scenario():
        with asked_to_stop(10.0, ends_at=time.time() + 10.01):
            await asyncio.Event().wait()

    with pytest.raises(RunStopped, match="10 s left, which are for the last checkpoint") as stopped:
        asyncio.run(asyncio.wait_for(scenario(), 30.0))
    assert stopped.value.exit_code == ExitCode.CONTINUE


def test_a_run_that_has_not_begun_a_step_ends_at_once():
    async def scenario():
        with asked_to_stop(1.0, ends_at=None) as stop:
            asyncio.get_running_loop().call_soon(stop.ask, "SIGUSR1")
            await asyncio.Event().wait()

    with pytest.raises(RunStopped, match="SIGUSR1; the same command continues the run"):
        asyncio.run(scenario())


def test_a_cancellation_of_another_kind_stays_one():
    async def scenario():
        with asked_to_stop(1.0, ends_at=None):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scenario())


def test_sigterm_while_ray_starts_is_a_run_that_was_stopped():
    """Ray's own handler leaves by SystemExit."""

    async def main():
        sys.exit(signal.SIGTERM)

    with pytest.raises(RunStopped, match="stopped: SIGTERM; the same command continues the run") as stopped:
        run_until_done(main())
    assert stopped.value.exit_code == ExitCode.TERMINATED


@pytest.mark.parametrize("ends_at", [3600.0, math.nan, math.inf])
def test_an_end_that_does_not_lie_ahead_is_refused_before_anything_starts(ends_at, tmp_path):
    """A scheduler would start the same command again and again."""
    from moerl import run

    with pytest.raises(ConfigError, match="ends_at = .*: must lie ahead"):
        run.train(make_config(tmp_path), ends_at=ends_at)
    assert not any(tmp_path.iterdir())
