"""Which metrics the report plots, and how; drawn by report.js. Charts without a single value are left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from moerl.observe.metrics import NOT_PHASES, metric
from moerl.observe.records import trained_rows

PARTS = "reward/part/"
Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """`y` has one value per step of `x`, null where the step has none."""

    name: str
    y: list[float | None]
    upper: list[float | None] | None = None
    """Other edge of a band: it lies between `y` and `upper`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    unit: str
    note: str
    x: list[float]
    traces: list[Trace]
    kind: Literal["lines", "stacked", "bars"] = "lines"
    log: bool = False
    wide: bool = False


def charts(rows: Rows) -> list[Chart]:
    found = [
        _reward_chart(rows),
        _phase_chart(trained_rows(rows)),
        _evaluation_chart(rows),
        _chart(rows, "Reward terms", _family(rows, PARTS), note="means over samples"),
        _chart(rows, "Response length", ("length/mean", "length/max"), note="response tokens, the end token included"),
        _chart(rows, "Truncated responses", ("length/truncated",), note="cut at the response limit"),
        _chart(rows, "KL", ("train/kl_old", "train/kl_reference"), note="to the old policy and to the initial model"),
        _chart(rows, "Mismatch", ("mismatch/mean", "mismatch/max"), note="|log-prob(trainer) - log-prob(rollout)|; no zeros", log=True),
        _chart(rows, "Entropy", ("train/entropy",), note="mean over response tokens"),
        _chart(rows, "Gradient norm", ("train/grad_norm",), note="before clipping; the largest of a step's updates"),
        _chart(rows, "Loss", ("train/loss",), note="its size says little"),
        _chart(rows, "Clipped tokens", ("train/clip_fraction",), note="response tokens whose ratio was clipped"),
        _chart(rows, "Throughput", ("tokens/per_second",), note="response tokens per wall time of a step"),
        _chart(rows, "Expert load", ("routing/load_max", "routing/load_mean", "routing/load_min"), note="share of routes * experts - 1"),
        _chart(rows, "Dead experts", ("routing/dead_experts",), note="of all layers, without a token in the step"),
        _chart(rows, "Replayed routes", ("routing/overlap", "routing/replayed"), note="replayed, and those the trainer had chosen too"),
        _chart(rows, "Staleness", ("staleness/mean", "staleness/max"), note="between sampling and training"),
        _chart(rows, "Groups without signal", ("groups/uniform", "groups/solved"), note="all rewards equal (uniform) or full (solved)"),
        _chart(rows, "Dropped groups", ("groups/dropped",), note="drawn and discarded by dynamic sampling"),
        _chart(rows, "Learning rate", ("train/lr",), note="of each step"),
    ]  # fmt: skip
    return [chart for chart in found if any(value is not None for trace in chart.traces for value in trace.y)]


def _reward_chart(rows: Rows) -> Chart:
    """The band is one standard deviation around the mean, cut at the lowest and highest reward of the step."""

    band: list[tuple[float | None, float | None]] = []
    for row in rows:
        match [row[name] for name in ("reward/mean", "reward/std", "reward/min", "reward/max") if name in row]:
            case [mean, std, least, most]:
                band.append((max(mean - std, least), min(mean + std, most)))
            case _:
                band.append((None, None))
    edges = Trace(name="one standard deviation", y=[lower for lower, _ in band], upper=[upper for _, upper in band])
    middle, *extremes = (Trace(name=name, y=_column(rows, f"reward/{name}")) for name in ("mean", "min", "max"))
    return Chart(title="Reward", unit="", note="mean over the step's samples", x=_steps(rows), traces=[middle, edges, *extremes], wide=True)


def _evaluation_chart(rows: Rows) -> Chart:
    """Chart of steps that were evaluated: joined by lines, whatever lies between."""
    measured = [row for row in rows if any(name.startswith("eval/") for name in row)]
    names = [
        name
        for name in _family(measured, "eval/")
        if name.rpartition("/")[2].startswith(("pass@", "reward")) and not name.endswith("_error")
    ]
    traces = [Trace(name=name.removeprefix("eval/"), y=_column(measured, name)) for name in names]
    return Chart(title="Evaluation", unit="", note="pass@k and mean reward of each data set", x=_steps(measured), traces=traces, wide=True)


def _phase_chart(rows: Rows) -> Chart:
    names = [name for name in _family(rows, "time/") if name not in NOT_PHASES]
    chart = _chart(rows, "Time per step", [*names, "time/other"], note="wall time by phase")
    # An area between steps needs two of them.
    kind: Literal["stacked", "bars"] = "stacked" if len(rows) > 1 else "bars"
    return replace(chart, unit="s", kind=kind, wide=True)


def _chart(rows: Rows, title: str, names: Sequence[str], *, note: str, log: bool = False) -> Chart:
    present = [name for name in names if any(name in row for row in rows)]
    units = dict.fromkeys(metric(name).unit for name in present if metric(name).unit not in title.lower())
    # A verifier names its own numbers, perhaps with a slash.
    short = {name: name.removeprefix(PARTS) if name.startswith(PARTS) else name.rpartition("/")[2] for name in present}
    traces = [Trace(name=short[name], y=_column(rows, name)) for name in present]
    return Chart(title=title, unit=", ".join(units), note=note, x=_steps(rows), traces=traces, log=log)


def _family(rows: Rows, prefix: str) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row if name.startswith(prefix)))


def _steps(rows: Rows) -> list[float]:
    return [row["step"] for row in rows]


def _column(rows: Rows, name: str) -> list[Any]:
    return [row.get(name) for row in rows]
