"""Observer of the loop, which is told each step: metrics to every destination, a row on the terminal, sample dumps, the log.

    with Observer(config) as observe:
        with observe.phase("rollout"): ...
        with observe.phase("update"): ...
        observe.step(version, groups, stats)

A resumed run needs nothing more: the first step it reports removes what an earlier process recorded from that step on.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Literal, Protocol, Self

from rich.console import Console

from moerl.config.load import to_plain
from moerl.config.schema.data_config import RewardConfig
from moerl.config.schema.run_config import RunConfig
from moerl.observe.dumps import SampleDumps
from moerl.observe.failure import FILE, write_failure
from moerl.observe.logs import RunLog
from moerl.observe.metrics import checkpoint_metrics, step_metrics, summarize
from moerl.observe.records import evaluated_versions, metrics_path, read_metrics
from moerl.observe.terminal import Terminal, duration, number
from moerl.observe.writers import JsonlWriter, MetricsWriter, TensorBoardWriter, WandbWriter
from moerl.types.errors import RunStopped, StoreError
from moerl.types.groups import Group
from moerl.types.stats import SavedCheckpoint, StepStats

log = logging.getLogger(__name__)

Status = Literal["finished", "failed", "interrupted"]


class Owner(Protocol):
    """Owner of something that every step's metrics tell: rollout servers, shared GPUs, the buffer of groups."""

    def step_metrics(self) -> Mapping[str, float]:
        """Metrics of the step that was just trained, under names of moerl/observe/metrics.py. Called once a step."""


class Observer:
    def __init__(self, config: RunConfig, *, console: Console | None = None, trains: bool = True):
        """`console` replaces the terminal that observe.terminal would open on standard output. `trains`: write_failure's."""
        self._run_dir, self._trains = config.run_dir, trains
        self._full_reward = full_reward(config.reward)
        self._clock = PhaseClock()
        self._owners: tuple[Owner, ...] = ()
        self._last_version: int | None = None
        self._failed_in: str | None = None
        (config.run_dir / FILE).unlink(missing_ok=True)
        self._checkpoint_metrics: dict[str, float] = {}
        self._status: Status | None = None
        self._dumps = SampleDumps(config.run_dir / "samples", every=config.observe.dump_every, num_groups=config.observe.dump_groups)
        self._writers: list[MetricsWriter] = []
        with ExitStack() as opened:
            self._terminal = Terminal(
                config.num_steps, console=console if config.observe.terminal else Console(quiet=True, force_terminal=False)
            )
            opened.callback(self._terminal.close)
            self._log = RunLog(config.run_dir / "run.log", self._terminal)
            opened.callback(self._log.close)
            for writer in _open_writers(config):
                self._writers.append(writer)
                opened.callback(self._close_writer, writer)
            self._evaluated = evaluated_versions(config.run_dir)  # once: the file grows with the run
            opened.callback(self.dump_last)
            self._opened = opened.pop_all()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time of the block counts as time/`name` of the current step; phases of one name add up. Phases do not nest.
        run.log tells when each begins."""
        log.info("phase %s begins", name)
        self._terminal.phase(name)
        try:
            with self._clock.phase(name):
                yield
        except BaseException:
            self._failed_in = name
            raise
        finally:
            self._terminal.phase(None)

    def ask(self, *owners: Owner) -> None:
        """`owners` add what they know to every step from now on."""
        self._owners = owners

    def step(self, version: int, groups: Sequence[Group], stats: StepStats) -> dict[str, float]:
        """Records the step that produced `version`, which was trained on `groups`; returns its metrics."""
        if self._last_version is None:
            self._forget_after(version - 1)
        assert self._last_version is None or version > self._last_version, f"step {version} after step {self._last_version}"
        step_seconds, phase_seconds = self._clock.lap()
        metrics = step_metrics(
            version,
            groups,
            stats,
            phase_seconds=phase_seconds,
            step_seconds=step_seconds,
            full_reward=self._full_reward,
        )
        for owner in self._owners:
            metrics |= owner.step_metrics()
        metrics |= self._checkpoint_metrics
        self._checkpoint_metrics = {}
        for writer in self._writers:
            writer.write(version, metrics)
        log.info("step %d took %s", version, duration(step_seconds))
        self._terminal.row(version, metrics)
        try:
            self._dumps.step(version, groups)
        except StoreError as error:  # the step is trained: what ranks cannot fetch either ends the run at the next one
            log.warning("the samples of step %d cannot be dumped: %s", version, error)
        # By now the loop has imported what it needs, and with it the handlers those libraries give themselves.
        self._log.silence_libraries()
        self._last_version = version
        return metrics

    def has_evaluated(self, version: int) -> bool:
        """Whether this process, or an earlier one that this one continues, has recorded an evaluation of `version`."""
        return version in self._evaluated

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """Records an evaluation of the weights of `version`, whose step, if there was one, is recorded already."""
        if self._last_version is None:
            self._forget_after(version)
        for writer in self._writers:
            writer.write(version, metrics)
        self._evaluated.add(version)
        told = [f"{name.removeprefix('eval/')} {number(value)}" for name, value in metrics.items() if not name.endswith("_error")]
        self.notice(f"evaluation of step {version}: {', '.join(told)}")

    def saved(self, checkpoints: Sequence[SavedCheckpoint]) -> None:
        """Checkpoints that became visible: to the log, and to the metrics of the step that is reported next."""
        for each in checkpoints:
            log.info(
                "checkpoint of step %d: %.1f MB in %s, training stood still for %s",
                each.version, each.num_bytes / 1e6, duration(each.seconds), duration(each.blocked_seconds),
            )  # fmt: skip
            stood_still = self._checkpoint_metrics.get("checkpoint/blocked_seconds", 0.0)  # for one that the same step tells
            self._checkpoint_metrics = checkpoint_metrics(each)
            self._checkpoint_metrics["checkpoint/blocked_seconds"] += stood_still

    def notice(self, text: str) -> None:
        """A result worth a line of its own, on the terminal and in run.log. Warnings go through a logger instead."""
        log.info(text)
        self._terminal.notice(text)

    def dump_last(self) -> None:
        """The samples of the last step, if they were not dumped. Before what they refer to is gone: with Ray's end at the latest."""
        try:
            self._dumps.dump_last()
        except (StoreError, OSError) as error:  # what ended the run may have ended it
            log.warning("the samples of the last step cannot be dumped: %s", error)

    def close(self, status: Status = "finished") -> None:
        """Ends every destination; safe to call twice, the first status counts."""
        if self._status is not None:
            return
        self._status = status
        with self._opened:
            self._summarize(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close("finished")
        elif isinstance(error, KeyboardInterrupt | asyncio.CancelledError | RunStopped):
            self.close("interrupted")
        else:
            # At INFO: the traceback belongs into run.log, and whoever catches the error shows it once.
            log.info("the run failed", exc_info=error)
            error.add_note(self.write_failure(error))
            try:
                self.close("failed")
            except OSError as unclosed:
                error.add_note(f"run.log and metrics.jsonl may lack their last lines: {unclosed}")

    def write_failure(self, error: BaseException) -> str:
        """The report of what ended the run; the closing lines for the terminal."""
        phase = self._clock.open_phase if self._failed_in is None else self._failed_in
        return write_failure(self._run_dir, error, phase=phase, version=self._last_version, trains=self._trains)

    def _close_writer(self, writer: MetricsWriter) -> None:
        writer.close(succeeded=self._status == "finished")

    def _forget_after(self, step: int) -> None:
        for writer in self._writers:
            writer.truncate_after(step)
        self._dumps.truncate_after(step)
        self._evaluated = {version for version in self._evaluated if version <= step}

    def _summarize(self, status: Status) -> None:
        rows = read_metrics(metrics_path(self._run_dir))
        totals = summarize(rows)
        lines = {"steps": number(rows[-1]["step"]) if rows else "0", "time": duration(totals.get("time/step", 0.0))}
        rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
        if rewards:
            lines["reward"] = f"{number(rewards[0])} at first, {number(rewards[-1])} at last, {number(max(rewards))} at best"
        if "mismatch/mean" in totals:
            lines["mismatch"] = f"mean {totals['mismatch/mean']:.1e}, max {totals['mismatch/max']:.1e}"
        lines["directory"] = str(self._run_dir)
        log.info("%s: %s", status, lines)
        self._terminal.summary(status, lines)


class PhaseClock:
    """Wall seconds of a step and of its phases. A step begins where the one before ended; the first one at its first phase."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self.open_phase: str | None = None
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        assert self.open_phase is None, f"phase {name} inside phase {self.open_phase}: their times would overlap"
        assert name not in ("step", "other"), f"time/{name} has a meaning of its own"
        begun = time.perf_counter()
        self._begun = begun if self._begun is None else self._begun
        self.open_phase = name
        try:
            yield
        finally:
            self.open_phase = None
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begun

    def lap(self) -> tuple[float, dict[str, float]]:
        """Seconds of the step that ends now, and of its phases."""
        assert self._begun is not None and self.open_phase is None, "a step ends after its phases"
        now = time.perf_counter()
        lap, self._begun = (now - self._begun, self._seconds), now
        self._seconds = {}
        return lap


def _open_writers(config: RunConfig) -> Iterator[MetricsWriter]:
    yield JsonlWriter(metrics_path(config.run_dir))
    if config.observe.tensorboard:
        yield TensorBoardWriter(config.run_dir / "tensorboard")
    if config.observe.wandb != "off":
        yield WandbWriter(
            config.run_dir,
            mode=config.observe.wandb,
            project=config.observe.wandb_project,
            name=config.name,
            config=to_plain(config),
        )


def full_reward(config: RewardConfig) -> float:
    """The most a sample can get when every term lies in [0, 1], as all of moerl's own do."""
    return sum(max(term.weight, 0.0) for term in config.terms.values())
