"""View of a person watching the run: one aligned row per step and, on a terminal, a live bar with the current phase.

Where output is not a terminal (CI logs, files) the same rows are printed without control codes, and there is no bar.
"""

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from moerl.observe.metrics import NOT_PHASES
from moerl.types.errors import MoerlError

Level = Literal["info", "warning", "error"]

HEADER_EVERY = 20
_STYLES: dict[Level, str] = {"info": "", "warning": "yellow", "error": "bold red"}
_CONTROL_CODES = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves with the cause, where Rich would leave by SystemExit, without a word."""
        with suppress(SystemExit):
            super().on_broken_pipe()  # nothing is printed from here on
        raise MoerlError(
            "standard output: nobody reads it any more, as after `| head`, or when the reader was ended\n"
            "The newest checkpoint has everything to go on from; the same command resumes"
        )


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    metric: str
    format: str
    width: int = 8


_COLUMNS = (
    _Column("reward", "reward/mean", ".3f"),
    _Column("length", "length/mean", ".1f"),
    _Column("stale", "staleness/mean", ".2f", 6),
    _Column("mismatch", "mismatch/mean", ".1e", 9),
    _Column("entropy", "train/entropy", ".3f"),
    _Column("tokens/s", "tokens/per_second", ",.0f"),
    _Column("step s", "time/step", ".2f"),
)


class Terminal:
    def __init__(self, num_steps: int, *, console: Console | None = None):
        self._num_steps = num_steps
        self._console = console if console is not None else _stdout_console()
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._progress = _progress(self._console)
        self._task = self._progress.add_task("starting", total=num_steps)
        self._rows = 0
        self._columns: tuple[_Column, ...] = ()
        if self._live:
            self._progress.start()

    def phase(self, name: str | None) -> None:
        """Phase in which the loop is; None: between two phases."""
        self._progress.update(self._task, description=name if name is not None else "")

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        columns = _columns_for(metrics)
        if self._rows == 0 and step > 1:
            # A resumed run begins past 0; the steps before must not count towards the speed that the ETA follows from.
            self._progress.reset(self._task, total=self._num_steps, completed=step - 1)
        if self._rows % HEADER_EVERY == 0 or columns != self._columns:
            self._print_row(["step".rjust(self._step_width), *(column.title.rjust(column.width) for column in columns)], style="bold")
        cells = [f"{step}/{self._num_steps}".rjust(self._step_width), *(_cell(column, metrics) for column in columns)]
        self._print_row(cells, style="")
        self._rows, self._columns = self._rows + 1, columns
        self._progress.update(self._task, completed=step)

    def notice(self, text: str, level: Level = "info") -> None:
        """A warning or a result, above the bar. Control codes are left out, and what its encoding lacks becomes escapes."""
        prefix, encoding = "" if level == "info" else f"{level}: ", self._console.encoding
        sendable = text.encode(encoding, errors="backslashreplace").decode(encoding)
        self._console.print(Text((prefix + sendable).translate(_CONTROL_CODES), style=_STYLES[level]), soft_wrap=True)

    def summary(self, title: str, values: Mapping[str, str]) -> None:
        """The last words: a title and aligned `name  value` lines."""
        width = max((len(name) for name in values), default=0)
        self.notice(title)
        for name, value in values.items():
            self.notice(f"  {name.ljust(width)}  {value}")

    def close(self) -> None:
        """Ends the bar and gives the terminal back; safe to call twice."""
        if self._live:
            self._progress.stop()

    @property
    def _step_width(self) -> int:
        return max(4, 2 * len(str(self._num_steps)) + 1)

    def _print_row(self, cells: list[str], *, style: str) -> None:
        if self._live:
            while len(cells) > 1 and len("  ".join(cells)) > self._console.width:
                cells = cells[:-1]
        self._console.print(Text("  ".join(cells), style=style), soft_wrap=True)


def number(value: float) -> str:
    """Text for people: four digits that count, no exponent unless there must be one."""
    if value == int(value) and abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _stdout_console() -> Console:
    # Asked here because rich also takes FORCE_COLOR and the like for a terminal, and a log file must stay free of control codes.
    is_terminal = sys.stdout.isatty()
    return _Console(file=sys.stdout, force_terminal=is_terminal, color_system="auto" if is_terminal else None, highlight=False)


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        # Steps of a large model take minutes; the speed must come from several of them.
        speed_estimate_period=3600.0,
    )


def _columns_for(metrics: Mapping[str, float]) -> tuple[_Column, ...]:
    phases = [name for name in metrics if name.startswith("time/") and name not in NOT_PHASES]
    return _COLUMNS + tuple(_Column(title := name.removeprefix("time/"), name, ".2f", max(7, len(title))) for name in phases)


def _cell(column: _Column, metrics: Mapping[str, float]) -> str:
    value = metrics.get(column.metric)
    return ("-" if value is None else format(value, column.format)).rjust(column.width)
