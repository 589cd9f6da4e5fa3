"""Rows of .parquet and .jsonl files in verl's schema.

    {"prompt": [{"role": "user", "content": "..."}], "reward_model": {"ground_truth": "..."}, "data_source": "...", "extra_info": {}}

Every row is read once, when the run starts, and every unusable one is reported. The rows then stay as compact as their file; one is
decoded again when it is drawn.
"""

import bisect
import difflib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moerl.config.schema.data_config import FileData
from moerl.rollout.datasets.dataset import Complaints, Row
from moerl.types.errors import Problem, can_be, problem
from moerl.types.json_text import parse_json


class FileDataset:
    """The rows of several files, one after the other."""

    def __init__(self, config: FileData, seed: int):
        """`seed` is without effect: files are what they are."""
        complaints = Complaints()
        self._files = list(_read(config.files, complaints))
        self._starts = [0, *itertools.accumulate(len(file) for _, file in self._files)]
        for index in range(len(self)):
            try:
                self[index]
            except ValueError as error:
                complaints.add(self.name_of(index), str(error))
        complaints.raise_if_any("the data has {count} problem(s); rows count from 1, in .jsonl files they are lines")

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Row:
        path, file, local = self._locate(index)
        return _row(file.decode(local), default_source=path.stem)

    def name_of(self, index: int) -> str:
        path, file, local = self._locate(index)
        return f"{path}, row {file.row_number(local)}"

    def _locate(self, index: int) -> "tuple[Path, _File, int]":
        which = bisect.bisect_right(self._starts, index) - 1
        return *self._files[which], index - self._starts[which]


class _JsonLines:
    """Blank lines are no rows."""

    def __init__(self, path: Path):
        lines = path.read_bytes().split(b"\n")
        self._numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
        self._lines = [lines[number - 1] for number in self._numbers]

    def __len__(self) -> int:
        return len(self._lines)

    def decode(self, index: int) -> Any:
        """Raises ValueError if the row is damaged."""
        try:
            return parse_json(self._lines[index])
        except ValueError as error:
            raise ValueError(f"is no JSON: {error}") from error

    def row_number(self, index: int) -> int:
        """Number in its file, from 1."""
        return self._numbers[index]


class _Parquet:
    """In batches: a row of a table is searched for in all of its row groups, and a table refuses nested text beyond 2 GB."""

    _COLUMNS = ("prompt", "reward_model", "data_source", "extra_info")
    _BATCH_ROWS = 16_384

    def __init__(self, path: Path):
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                present = file.schema_arrow.names
                columns = [name for name in self._COLUMNS if name in present]
                if twice := [name for name in columns if present.count(name) > 1]:
                    raise ValueError(f"has several columns of the name {twice[0]}")
                if "prompt" not in present:
                    raise ValueError(f"has no column prompt, but {', '.join(present)}")
                self._batches = list(file.iter_batches(batch_size=self._BATCH_ROWS, columns=columns))
        except pyarrow.ArrowException as error:
            raise ValueError(str(error)) from error
        self._starts = [0, *itertools.accumulate(batch.num_rows for batch in self._batches)]

    def __len__(self) -> int:
        return self._starts[-1]

    def decode(self, index: int) -> Any:
        which = bisect.bisect_right(self._starts, index) - 1
        batch, local = self._batches[which], index - self._starts[which]
        try:
            row = {name: batch.column(name)[local].as_py() for name in batch.schema.names}
            return row if row.get("prompt") is None else row | {"prompt": _without_nulls(row["prompt"])}
        except OverflowError as error:
            raise ValueError(f"holds a date, a time or a duration beyond those of Python: {error}") from error
        except ValueError as error:  # whose text is of doubled fields, whatever it came from
            if isinstance(error.__context__, KeyError):  # of pytz and of zoneinfo
                raise ValueError(f"holds a time of a zone that this system does not know: {error.__context__}") from error
            raise

    def row_number(self, index: int) -> int:
        return index + 1


def _without_nulls(value: Any) -> Any:
    """Without the fields that are null: every object of a column has the fields of all, as a tool's call the arguments of all tools."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


_File = _JsonLines | _Parquet
_FORMATS: dict[str, Callable[[Path], _File]] = {".parquet": _Parquet, ".jsonl": _JsonLines}


def check(config: FileData) -> Iterator[Problem]:
    suffixes = " or ".join(_FORMATS)
    if not config.files:
        yield problem("data.files", [], "needs a file", "prompts come from it", f"data.files=[train{next(iter(_FORMATS))}]")
    for index, name in enumerate(config.files):
        path, file = f"data.files.{index}", Path(name)
        if file.suffix not in _FORMATS:
            near = difflib.get_close_matches(file.suffix, _FORMATS, n=1)
            fix = f"rename it to {file.stem}{near[0]} if that is what it holds" if near else f"a {suffixes} file"
            yield problem(path, name, f"must end in {suffixes}", "the suffix says how to read it", fix)
        elif not (can_be(file) and file.is_file()):
            yield problem(path, name, "is not a file", f"looked at {file.absolute()}", "correct the path")


def _read(names: tuple[str, ...], complaints: Complaints) -> Iterator[tuple[Path, _File]]:
    """The readable files that have rows."""
    for path in map(Path, names):
        try:
            file = _FORMATS[path.suffix](path)
        except KeyError:
            complaints.add(str(path), f"must end in {' or '.join(_FORMATS)}: the suffix says how to read it")
        except (OSError, ValueError) as error:
            complaints.add(str(path), f"cannot be read: {error}")
        else:
            if len(file) == 0:
                complaints.add(str(path), "has no rows")
            else:
                yield path, file


def _row(raw: Any, *, default_source: str) -> Row:
    """Raises ValueError: what is wrong, and what to write."""
    if not isinstance(raw, dict):
        raise ValueError(f"is no object but {_short(raw)}")
    source, extra_info = raw.get("data_source"), raw.get("extra_info")
    if source is not None and not isinstance(source, str):
        raise ValueError(f"data_source must be text, not {_short(source)}")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise ValueError(f"extra_info must be an object, not {_short(extra_info)}")
    row = Row(
        messages=_messages(raw),
        data_source=source if source is not None else default_source,
        ground_truth=_ground_truth(raw),
        extra_info=extra_info if extra_info is not None else {},
    )
    _check_text(row)
    return row


def _check_text(row: Row) -> None:
    """Raises ValueError for what no file and no tokenizer takes: JSON may name half of a character."""
    nested = (json.dumps(each, ensure_ascii=False, default=str) for each in (row.messages, row.extra_info))
    try:
        for text in (*nested, row.data_source, row.ground_truth):
            text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds half of a character ({error.object[error.start]!a}), which is no text") from error
    except RecursionError as error:
        raise ValueError("prompt or extra_info is nested too deeply") from error


def _messages(raw: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """As they are, without what is null."""
    if raw.get("prompt") is None:
        raise ValueError(f"has no prompt; its columns: {', '.join(raw)}")
    prompt = raw["prompt"]
    if not isinstance(prompt, list):
        raise ValueError(f'prompt must be a list of messages, [{{"role": "user", "content": "..."}}], not {_short(prompt)}')
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"a message of the prompt must be an object with role and content, both text, not {_short(message)}")
    if not any(message["content"] for message in prompt):
        raise ValueError("prompt is empty: no message has content")
    return tuple({name: value for name, value in message.items() if value is not None} for message in prompt)


def _ground_truth(raw: dict[str, Any]) -> str:
    reward_model = raw.get("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if truth is None:
        raise ValueError("has no reward_model.ground_truth: nothing to score a response against")
    if not isinstance(truth, str):
        # 7 and 7.0 are the same number and different texts; files change one into the other.
        raise ValueError(f"reward_model.ground_truth must be text, not {_short(truth)}")
    return truth


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
