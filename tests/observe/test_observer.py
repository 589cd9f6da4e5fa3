import asyncio
import io
import logging
import sys
import warnings
from dataclasses import replace

import pytest
from rich.console import Console

from moerl.observe.dumps import dumped_steps
from moerl.observe.observer import Observer, PhaseClock, full_reward
from moerl.observe.records import metrics_path, read_metrics
from moerl.types.errors import ConfigError, HangError, StoreError
from moerl.types.stats import SavedCheckpoint


@pytest.fixture
def console():
    return Console(file=io.StringIO(), force_terminal=False, width=200)


@pytest.fixture
def take_steps(make_group, make_sample, make_stats):
    def take(observe, versions):
        for version in versions:
            with observe.phase("update"):
                pass
            observe.step(version, [make_group(make_sample(float(version)))], make_stats())

    return take


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when told to."""
    now = [100.0]
    monkeypatch.setattr("moerl.observe.observer.time.perf_counter", lambda: now[0])

    def pass_seconds(seconds):
        now[0] += seconds

    return pass_seconds


def test_phases_of_one_name_add_up_and_steps_follow_each_other(clock):
    phases = PhaseClock()
    clock(50)
    for seconds in (1.0, 2.0):
        with phases.phase("rollout"):
            clock(seconds)
        clock(0.5)
    assert phases.lap() == (4.0, {"rollout": 3.0}), "what came before the first phase is no part of the first step"
    clock(0.25)
    with phases.phase("update"):
        clock(1.0)
    assert phases.lap() == (1.25, {"update": 1.0})


def test_a_phase_that_fails_is_measured_and_over(clock):
    phases = PhaseClock()

    def fail():
        clock(1.0)
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"), phases.phase("rollout"):
        fail()
    with phases.phase("update"):
        clock(2.0)
    assert phases.lap() == (3.0, {"rollout": 1.0, "update": 2.0})


def test_overlapping_phases_are_refused(clock):
    phases = PhaseClock()
    with pytest.raises(AssertionError, match="update inside phase rollout"), phases.phase("rollout"), phases.phase("update"):
        pass


def test_a_step_reaches_every_destination(make_config, take_steps, console):
    config = make_config(terminal=True, tensorboard=True, dump_every=1)
    with Observer(config, console=console) as observe:
        take_steps(observe, [1])
        observe.notice("canary: 1.0e-07")
    assert read_metrics(config.run_dir / "metrics.jsonl")[0]["reward/mean"] == 1.0
    assert list(dumped_steps(config.run_dir / "samples")) == [1]
    assert list((config.run_dir / "tensorboard").iterdir())
    output = console.file.getvalue()
    assert "1/100" in output and "canary: 1.0e-07" in output and "finished" in output
    assert "canary: 1.0e-07" in (config.run_dir / "run.log").read_text()


def test_a_resumed_run_has_every_step_once(make_config, take_steps):
    config = make_config(dump_every=1)
    first = Observer(config)
    take_steps(first, range(1, 8))
    first.close("failed")
    with Observer(config) as observe:
        take_steps(observe, range(5, 7))
    assert [row["step"] for row in read_metrics(config.run_dir / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert list(dumped_steps(config.run_dir / "samples")) == [1, 2, 3, 4, 5, 6]


def test_a_run_that_starts_anew_before_any_checkpoint_forgets_everything(make_config, take_steps):
    config = make_config()
    for last in (4, 2):
        with Observer(config) as observe:
            take_steps(observe, range(1, last + 1))
    assert [row["step"] for row in read_metrics(config.run_dir / "metrics.jsonl")] == [1, 2]


def test_opening_an_observer_alone_forgets_nothing(make_config, take_steps):
    config = make_config()
    with Observer(config) as observe:
        take_steps(observe, [1, 2])
    with Observer(config):
        pass
    assert [row["step"] for row in read_metrics(config.run_dir / "metrics.jsonl")] == [1, 2]


def test_a_report_that_cannot_be_written_does_not_take_the_place_of_the_failure(make_config):
    config = make_config()
    with pytest.raises(HangError, match="rank 5") as caught, Observer(config):
        (config.run_dir / "failure.txt").mkdir()
        raise HangError("update: rank 5 did not arrive")
    assert "the failure report could not be written" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "finished"), (RuntimeError("x"), "failed"), (KeyboardInterrupt(), "interrupted"), (asyncio.CancelledError(), "interrupted")],
)
def test_the_last_step_is_dumped_and_the_status_told_however_the_run_ends(make_config, take_steps, console, error, status):
    config = make_config(terminal=True, dump_every=10)
    observe = Observer(config, console=console)
    take_steps(observe, [1, 2, 3])
    observe.__exit__(type(error) if error else None, error, None)
    assert list(dumped_steps(config.run_dir / "samples")) == [1, 3]
    assert status in console.file.getvalue().splitlines()


def test_a_step_whose_samples_are_lost_counts_and_only_its_dump_is_missing(make_config, take_steps, monkeypatch, caplog):
    config = make_config(dump_every=1)
    observe = Observer(config)
    with monkeypatch.context() as lost:

        def fetch(stored, seconds):
            raise StoreError("samples were lost with the process that had received them")

        lost.setattr("moerl.observe.dumps.fetch", fetch)
        take_steps(observe, [1])
    take_steps(observe, [2])
    observe.close()
    assert [row["step"] for row in read_metrics(config.run_dir / "metrics.jsonl")] == [1, 2]
    assert list(dumped_steps(config.run_dir / "samples")) == [2]
    assert "the samples of step 1 cannot be dumped: samples were lost" in caplog.text


def test_closing_twice_keeps_the_first_status(make_config, console):
    observe = Observer(make_config(terminal=True), console=console)
    observe.close("interrupted")
    observe.close("failed")
    assert "failed" not in console.file.getvalue()


def test_warnings_of_moerl_are_shown_and_those_of_libraries_only_logged(make_config, console, capsys):
    config = make_config(terminal=True)
    noisy = logging.getLogger("a_library.part")
    handler = logging.StreamHandler(sys.stderr)
    noisy.addHandler(handler)
    noisy.propagate = False
    try:
        with Observer(config, console=console):
            noisy.warning("tokenizer chatter")
            warnings.warn("deprecated thing", stacklevel=1)
            logging.getLogger("moerl.rewards").warning("a verifier was killed")
            logging.getLogger("moerl.rewards").error("a verifier is lost")
            logging.getLogger("moerl.rewards").info("detail")
        logging.getLogger("moerl.rewards").warning("of whatever comes after the run")
        assert noisy.handlers == [handler] and not noisy.propagate, "as it was found"
    finally:
        noisy.removeHandler(handler)
        noisy.propagate = True
    shown = console.file.getvalue()
    assert "warning: a verifier was killed" in shown and "error: a verifier is lost" in shown
    assert not [text for text in ("chatter", "deprecated", "detail", "after the run") if text in shown + capsys.readouterr().err]
    logged = (config.run_dir / "run.log").read_text()
    assert not [text for text in ("tokenizer chatter", "deprecated thing", "a verifier was killed", "detail") if text not in logged]


def test_the_root_logger_is_given_back(make_config):
    before = (logging.root.level, list(logging.root.handlers), logging.getLogger("moerl").level)
    with Observer(make_config()):
        assert logging.root.handlers != before[1]
    assert (logging.root.level, list(logging.root.handlers), logging.getLogger("moerl").level) == before


def test_an_observer_that_cannot_open_gives_everything_back(make_config, monkeypatch):
    handlers = list(logging.root.handlers)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"observe\.wandb = 'offline'[\s\S]*not installed"):
        Observer(make_config(wandb="offline"))
    assert logging.root.handlers == handlers


def test_a_full_reward_is_the_sum_of_the_positive_weights(make_config):
    terms = make_config().reward.terms
    weights = {"math": 0.75, "format": 0.25, "repetition": -1.0}
    config = replace(make_config().reward, terms={name: replace(terms["prefix"], weight=weight) for name, weight in weights.items()})
    assert full_reward(config) == 1.0


def test_owners_are_asked_at_each_step_for_what_they_know(make_config, make_stats, make_group, make_sample):
    class Counter:
        count = 0.0

        def step_metrics(self):
            self.count += 1
            return {"fleet/restarts": self.count}

    told = []
    with Observer(make_config()) as observe:
        observe.ask(Counter())
        for version in (1, 2):
            with observe.phase("update"):
                pass
            told.append(observe.step(version, [make_group(make_sample())], make_stats())["fleet/restarts"])
    assert told == [1.0, 2.0]


def test_time_that_two_checkpoints_took_of_one_step_adds_up(make_config, take_steps):
    config = make_config()
    with Observer(config) as observe:
        saved = [SavedCheckpoint(version=version, num_bytes=version, seconds=2.0, blocked_seconds=0.25 * version) for version in (1, 2)]
        observe.saved(saved)
        take_steps(observe, [1, 2])
    first, second = read_metrics(config.run_dir / "metrics.jsonl")
    assert (first["checkpoint/bytes"], first["checkpoint/blocked_seconds"]) == (2, 0.75)
    assert "checkpoint/blocked_seconds" not in second


def test_what_was_evaluated_is_read_once_and_forgotten_with_the_steps_that_a_resumed_run_takes_anew(make_config, console, take_steps):
    config = make_config()
    with Observer(config, console=console) as observe:
        for version in range(1, 5):
            take_steps(observe, [version])
            observe.evaluated(version, {"eval/sums/reward": 0.5})
    with Observer(config, console=console) as observe:
        metrics_path(config.run_dir).rename(config.run_dir / "elsewhere")  # whoever reads it at every evaluation reads the whole run
        assert [version for version in range(7) if observe.has_evaluated(version)] == [1, 2, 3, 4]
        (config.run_dir / "elsewhere").rename(metrics_path(config.run_dir))
        take_steps(observe, [3])
        assert [version for version in range(7) if observe.has_evaluated(version)] == [1, 2]
        observe.evaluated(3, {"eval/sums/reward": 0.5})
        assert observe.has_evaluated(3)
