"""One HTML page about a run, from its directory alone: charts, numbers, samples to browse. Works on a run that is still going.

The page holds everything it needs and loads nothing. Model output reaches it as data only: it is escaped in the source, shown
as text, and a content security policy admits no script but the page's own.
"""

import base64
import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from moerl.config.derive.eval_settings import is_evaluated
from moerl.config.schema.run_config import RunConfig
from moerl.observe.charts import charts
from moerl.observe.dumps import dumped_steps
from moerl.observe.failure import FILE
from moerl.observe.metrics import metric, summarize
from moerl.observe.records import evaluated_versions, metrics_path, read_metrics, read_records, trained_rows
from moerl.observe.terminal import duration, number
from moerl.train.checkpoint.checkpoint_dirs import newest, version_of
from moerl.types.errors import ReportError

SAMPLE_BYTES = 32 * 2**20
"""A browser opens a page of this much text without complaint; of more dumps, an even selection is shown."""


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Writes the page to `out` (default: report.html in the run directory) and returns its path."""
    source = metrics_path(run_dir)
    if not source.is_file():
        raise ReportError(
            f"{run_dir} = no run directory: must hold metrics.jsonl, which a run writes from its first step on. "
            "Name the directory of a run (output_dir/name), and wait for its first step if it has just begun."
        )
    rows = read_metrics(source)
    if not rows:
        raise ReportError(f"{source} = empty: must hold at least one step. The run has not finished its first step; try again after it.")
    path = out if out is not None else run_dir / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, _render(run_dir, rows))
    return path


def _replace(path: Path, text: str) -> None:
    """The page whole, or what was there: a disk may be full. What is no file, as /dev/stdout, is written to."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", errors="replace")
        return
    target = path.resolve()
    beside = target.with_name(f".{target.name}.new")
    try:
        beside.write_text(text, encoding="utf-8", errors="replace")
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def report_finished(config: RunConfig) -> Path | None:
    """Writes the report of a run that has nothing left to do: its last step is saved, and evaluated if it is to be. None of any other."""
    saved = newest(config.run_dir / "checkpoints")
    if saved is None or version_of(saved) < config.num_steps or not metrics_path(config.run_dir).is_file():
        return None
    ends_there = version_of(saved) == config.num_steps  # else the weights of that step are gone
    if ends_there and is_evaluated(config, config.num_steps) and config.num_steps not in evaluated_versions(config.run_dir):
        return None
    (config.run_dir / FILE).unlink(missing_ok=True)
    return write_report(config.run_dir)


def _render(run_dir: Path, rows: list[dict[str, float]]) -> str:
    settings = run_dir / "config.yaml"
    config_text = settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else ""
    config = _settings(settings, config_text)
    dumps, num_dumps = _dumps(run_dir / "samples")
    scripts = {"plotly_js": get_plotlyjs(), "report_js": _file("report.js")}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_file("report.html.j2")).render(
        name=config.get("name", run_dir.resolve().name),
        config_text=config_text,
        facts=_facts(config),
        tiles=_tiles(rows, config),
        table=_table(rows),
        num_dumps=num_dumps,
        num_shown=len(dumps),
        data={"charts": [asdict(chart) for chart in charts(rows)], "dumps": dumps},
        css=Markup(_file("report.css")),
        script_hashes=" ".join(_hash(script) for script in scripts.values()),
        **{name: Markup(script) for name, script in scripts.items()},
    )


def _settings(path: Path, text: str) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise ReportError(f"{path} = damaged: must be YAML, as the run wrote it: {error}") from error
    if not isinstance(found, dict):
        raise ReportError(f"{path} = damaged: must hold the settings of the run, and holds {type(found).__name__}")
    return found


def _facts(config: Mapping[str, Any]) -> dict[str, str]:
    """The settings a reader asks for first; those that a run does not have are left out."""
    scratch, layout = _at(config, "model.scratch"), _at(config, "train.layout") or {}
    sizes = ", ".join(f"{name} {size}" for name, size in layout.items() if name == "ranks" or str(size) not in ("None", "False", "1"))
    facts = {
        "Model": _at(config, "model.path") or (scratch and f"{scratch.get('family')} from scratch"),
        "Data": _at(config, "data.task") or _at(config, "data.files"),
        "Algorithm": ", ".join(filter(None, (_at(config, f"algorithm.{part}.kind") for part in ("advantage", "objective")))),
        "Batch": _at(config, "group_size") and f"{config.get('groups_per_step')} groups of {config['group_size']}",
        "Learning rate": _at(config, "train.optimizer.lr"),
        "Training": sizes,
        "Rollout": _at(config, "rollout.engine") and f"{_at(config, 'rollout.num_servers')} x {_at(config, 'rollout.engine')}",
        "Precision": _at(config, "train.dtype"),
        "Max staleness": _at(config, "max_staleness"),
        "Seed": _at(config, "seed"),
    }
    return {
        name: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in facts.items()
        if value not in (None, "")
    }


def _tiles(rows: list[dict[str, float]], config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Label, value and remark of the numbers on top; those of "last 10" are means over the newest ten steps, throughput their tokens by
    their time."""
    trained = trained_rows(rows)
    newest_steps = trained[-10:]
    first, recent, total = summarize(trained[:1]), summarize(newest_steps), summarize(rows)
    seconds, tokens = recent.get("time/step", 0.0), recent.get("tokens/response")
    per_step, window = seconds / max(1, len(newest_steps)), f"last {len(newest_steps)}"
    planned = config.get("num_steps")

    def trend(label: str, name: str, unit: str = "") -> tuple[str, str, str]:
        return label, _number_or_none(recent.get(name)), f"{unit}{window}; {_number_or_none(first.get(name))} at first"

    found = [
        ("Steps", number(rows[-1]["step"]), f"of {number(planned)}" if planned is not None else ""),
        trend("Reward", "reward/mean"),
        trend("Response length", "length/mean", "tokens, "),
        ("Mismatch", _number_or_none(recent.get("mismatch/mean")), f"{window}; largest ever {_number_or_none(total.get('mismatch/max'))}"),
        trend("Entropy", "train/entropy", "nats, "),
        ("Throughput", _number_or_none(None if tokens is None or not seconds else tokens / seconds), f"tokens/s, {window}"),
        ("Time", duration(total.get("time/step", 0.0)), f"{duration(per_step)} per step, {window}"),
    ]
    return [tile for tile in found if tile[1]]


def _table(rows: list[dict[str, float]]) -> list[dict[str, str]]:
    """Every metric of the run: first and last value, and over all steps by the metric's own reduction. An evaluation before the first step
    counts as that step's, unless it has one of its own."""
    begun = next((row["step"] for row in trained_rows(rows)), rows[0]["step"])
    first, last, total = summarize([row for row in rows if row["step"] <= begun]), summarize(rows[-1:]), summarize(rows)
    return [
        {
            "name": name,
            "unit": metric(name).unit,
            "first": _number_or_none(first.get(name)),
            "last": _number_or_none(last.get(name)),
            "total": _number_or_none(value),
            "reduction": metric(name).over_steps,
            "goal": metric(name).goal.replace("none", ""),
            "meaning": metric(name).meaning,
        }
        for name, value in total.items()
    ]


def _dumps(directory: Path) -> tuple[list[dict[str, Any]], int]:
    """The dumped steps to show, and how many there are: all, or every 2nd, 4th, ... back from the last so that they fit."""
    paths = list(dumped_steps(directory).items())
    stride = 1
    while stride < len(paths) and sum(path.stat().st_size for _, path in paths[::-stride]) > SAMPLE_BYTES:
        stride *= 2
    shown = paths[::-stride][::-1]
    return [{"step": step, "samples": read_records(path)} for step, path in shown], len(paths)


def _at(config: Mapping[str, Any], path: str) -> Any:
    """The value under a dotted path, None where a section lacks it: a report must open for settings of any version."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _number_or_none(value: float | None) -> str:
    return "" if value is None else number(value)


def _file(name: str) -> str:
    return resources.files("moerl.observe").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"
