"""Files of one JSON object per line, written by a process that may be killed at any byte and read while it still runs.

Every line is one write, so only the last one can be torn; readers leave it out and writers remove it.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moerl.types.errors import ReportError


def to_line(record: Mapping[str, Any]) -> str:
    """One line of strict JSON: what is not a finite number becomes null."""
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n"


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every whole line. A damaged line before the last is a ReportError that names it."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ReportError(
                    f"{path} line {number} = {line[:60]!r}: must be one JSON object ({error.msg}). Only the last line may be cut short, "
                    "by a process that was killed; this one was damaged otherwise. Remove the line to go on without it."
                ) from error
    return records


def metrics_path(run_dir: Path) -> Path:
    return run_dir / "metrics.jsonl"


def step_records(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a metrics.jsonl, each with its "step"."""
    records = read_records(path)
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not isinstance(record.get("step"), int | float):
            raise ReportError(
                f'{path} record {number} = {str(record)[:60]!r}: must be a step\'s metrics, with its "step". Remove the line.'
            )
    return records


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The steps of a metrics.jsonl, each with its "step"; a value that was not finite is absent.

    A step that was evaluated has two lines, and is one here.
    """
    steps: dict[int, dict[str, float]] = {}
    for record in step_records(path):
        steps.setdefault(record["step"], {}).update({name: value for name, value in record.items() if value is not None})
    return list(steps.values())


def trained_rows(rows: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Rows of steps that trained: weights that a run begins with may have been evaluated, which makes a row without a step."""
    return [row for row in rows if any(name != "step" and not name.startswith("eval/") for name in row)]


def evaluated_versions(run_dir: Path) -> set[int]:
    """Versions of which an evaluation is recorded."""
    records = step_records(metrics_path(run_dir))
    return {record["step"] for record in records if any(name.startswith("eval/") and record[name] is not None for name in record)}


def replace_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """The file with exactly these lines; a reader sees the old one or the new one, nothing between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    # A lone surrogate, which UTF-8 cannot hold, becomes \udXXX: inside a JSON string that is its own escape.
    with beside.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        file.writelines(to_line(record) for record in records)
    os.replace(beside, path)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(child) for name, child in value.items()}
    return [_finite(child) for child in value] if isinstance(value, list | tuple) else value
