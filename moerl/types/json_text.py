"""JSON that somebody else wrote: every fault of it is a ValueError."""

import json
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError, also for what is nested more deeply than Python parses."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_object(file: Path) -> dict[str, Any]:
    """The object in `file`. Raises OSError, and ValueError for anything else."""
    value = parse_json(file.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"holds no object but {type(value).__name__}")
    return value


def is_file_name(name: object) -> bool:
    """Whether a file that names others may name this one: beside it, in no other folder, of text, and no longer
    than file systems take."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and 0 < len(name.encode()) <= 255
        and name not in (".", "..")
        and not {*"/\0"} & {*name}
    )
